// Argument checks that all bindings share. A bad argument raises ValueError with the numbers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "pool.h"

namespace coldpress {

namespace nb = nanobind;

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline std::string text(int64_t number) { return std::to_string(number); }

inline void expect(bool good, const std::string& message) {
    if (!good) throw std::invalid_argument(message);
}

inline void expect_length(const char* name, size_t found, int64_t expected) {
    expect(static_cast<int64_t>(found) == expected,
           std::string(name) + " has " + text(static_cast<int64_t>(found)) + " values, expected " + text(expected));
}

template <typename Array>
void expect_shape(const char* name, const Array& array, int64_t rows, int64_t columns) {
    expect_length(name, array.shape(0), rows);
    expect_length(("a row of " + std::string(name)).c_str(), array.shape(1), columns);
}

inline int threads_of(int num_threads) {
    expect(num_threads >= 0 && num_threads <= 1024,
           "num_threads is " + text(num_threads) + ", expected 1 to 1024, or 0 for the default");
    return num_threads ? num_threads : default_threads();
}

inline void expect_slots(const Ids& slots, size_t rows) {
    for (size_t i = 0; i < slots.shape(0); ++i) {
        const int32_t slot = slots.data()[i];
        // Format the message only on failure: doing so for every slot would take as long as the product.
        if (slot < 0 || static_cast<size_t>(slot) >= rows)
            throw std::invalid_argument("slot " + text(slot) + " at index " + text(static_cast<int64_t>(i)) +
                                        " is outside the store of " + text(static_cast<int64_t>(rows)) + " slots");
    }
}

// Products with rows, and the choice of intervals (bind_products.cpp).
void bind_products(nb::module_& m);

}  // namespace coldpress
