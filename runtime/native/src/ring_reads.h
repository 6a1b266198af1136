// Reads through io_uring: one thread of the process submits all reads and checks the pages that arrive.
#pragma once

#include "reads.h"

namespace coldpress {

// 0, or the errno with which the kernel refuses io_uring.
int ring_error();

// Up to `depth` pieces in flight, counted over all RingReads of the process. Only use if ring_error() is 0.
class RingReads : public Reads {
   public:
    RingReads(const Request& request, int depth);
    ~RingReads() override;

   private:
    friend class RingEngine;
};

}  // namespace coldpress
