// Reads through io_uring: one thread of the process hands all of them to the kernel and checks what comes back.
#pragma once

#include "reads.h"

namespace coldpress {

// 0, or the errno with which the kernel refuses io_uring.
int ring_error();

// Up to `depth` pieces in flight, those of all RingReads of the process counted together. Only where ring_error() is 0.
class RingReads : public Reads {
   public:
    RingReads(const Request& request, int depth);
    ~RingReads() override;

   private:
    friend class RingEngine;
};

}  // namespace coldpress
