// Holds the kernels of one instruction set against the portable ones: main() of tests/runtime/test_neon.py.
// Prints "kernel format difference": the largest difference over what float32 sums of these terms may differ by.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"

using namespace coldpress;

namespace {

std::mt19937 draw(7);

float normal() { return std::normal_distribution<float>()(draw); }

// Random codes; scales and halves are finite and about 2^-5 to 2^5.
std::vector<uint8_t> random_rows(Format format, int64_t count, int64_t length) {
    std::vector<uint8_t> rows(static_cast<size_t>(count * row_bytes(format, length)));
    for (uint8_t& byte : rows) byte = static_cast<uint8_t>(draw());
    const auto half = [] {
        return static_cast<uint16_t>((draw() & 0x8000) | ((10 + draw() % 10) << 10) | (draw() & 0x3FF));
    };
    if (format == Format::fp16) {
        for (size_t at = 0; at < rows.size(); at += 2) {
            const uint16_t value = half();
            std::memcpy(&rows[at], &value, 2);
        }
    } else {
        const Layout layout = layout_of(format);
        for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(block_bytes(format))) {
            const uint16_t value = half(), minimum = half();
            std::memcpy(&rows[at + static_cast<size_t>(layout.scale_at)], &value, 2);
            if (has_layout(format) && layout.minimum_at != kNone)
                std::memcpy(&rows[at + static_cast<size_t>(layout.minimum_at)], &minimum, 2);
        }
    }
    return rows;
}

struct Worst {
    double found = 0;
    void note(float ours, float theirs, double scale) {
        const double difference = std::fabs(static_cast<double>(ours) - theirs) / (scale * 1e-6 + 1e-30);
        if (!(difference <= found)) found = difference;  // not-a-number counts
    }
    void print(const char* kernel, Format format) {
        std::printf("%s %d %.6g\n", kernel, static_cast<int>(format), found);
    }
};

void check(const Kernels& kernels, Format format, int64_t count, int64_t length) {
    const Kernels& portable = kPortableKernels;
    const int64_t padded = padded_values(length), room = padded / kBlock;
    const std::vector<uint8_t> bytes = random_rows(format, count, length);
    std::vector<const uint8_t*> rows;
    for (int64_t i = 0; i < count + kRowsAhead; ++i)
        rows.push_back(bytes.data() + std::min(i, count - 1) * row_bytes(format, length));
    std::vector<float> x(static_cast<size_t>(padded)), coefficients(static_cast<size_t>(count));
    for (int64_t i = 0; i < length; ++i) x[static_cast<size_t>(i)] = normal();
    for (float& value : coefficients) value = normal();

    Worst decoded, dots, sums;
    std::vector<std::vector<float>> values;
    std::vector<double> magnitudes;
    for (int64_t i = 0; i < count; ++i) {
        std::vector<float> ours(static_cast<size_t>(length)), theirs(ours);
        kernels.decode(format, rows[static_cast<size_t>(i)], length, kBlock, false, ours.data());
        portable.decode(format, rows[static_cast<size_t>(i)], length, kBlock, false, theirs.data());
        double magnitude = 0;
        for (size_t j = 0; j < ours.size(); ++j) {
            decoded.note(ours[j], theirs[j], 0);
            magnitude += std::fabs(static_cast<double>(theirs[j]) * x[j]);
        }
        values.push_back(theirs);
        magnitudes.push_back(magnitude);
    }
    decoded.print("decode", format);

    std::vector<float> ours(static_cast<size_t>(count)), theirs(ours);
    const auto dot = [&](const Kernels& its, std::vector<float>& out) {
        std::vector<float> in(static_cast<size_t>(padded));
        std::copy_n(x.begin(), length, in.begin());
        const float* const vector = in.data();
        float* const products = out.data();
        its.dot(format, rows.data(), count, length, 1, &vector, &products);
    };
    dot(kernels, ours);
    dot(portable, theirs);
    for (size_t i = 0; i < ours.size(); ++i) dots.note(ours[i], theirs[i], magnitudes[i]);
    dots.print("dot", format);

    std::vector<float> y(static_cast<size_t>(length), 1.0f), z(y);
    const auto axpy = [&](const Kernels& its, std::vector<float>& out) {
        std::vector<float> sums(static_cast<size_t>(padded));
        std::copy_n(out.begin(), length, sums.begin());
        const float* const weights = coefficients.data();
        float* const to = sums.data();
        its.axpy(format, rows.data(), count, length, 1, &weights, &to);
        std::copy_n(sums.begin(), length, out.begin());
    };
    axpy(kernels, y);
    axpy(portable, z);
    for (int64_t j = 0; j < length; ++j) {
        double magnitude = 1;
        for (size_t i = 0; i < values.size(); ++i)
            magnitude += std::fabs(static_cast<double>(coefficients[i]) * values[i][static_cast<size_t>(j)]);
        sums.note(y[static_cast<size_t>(j)], z[static_cast<size_t>(j)], magnitude);
    }
    sums.print("axpy", format);

    Worst panels, products_of_matrices;
    const int64_t stride = 2 * kBlock;
    std::vector<float> mine(static_cast<size_t>(stride * blocks_of(length)), 0.0f);
    kernels.decode(format, rows[0], length, stride, true, mine.data());
    for (int64_t j = 0; j < length; ++j)
        panels.note(mine[static_cast<size_t>(j / kBlock * stride + j % kBlock)], values[0][static_cast<size_t>(j)], 0);
    panels.print("decode_panels", format);

    const int64_t depth = std::min(kDepth, length);
    std::vector<float> factors(static_cast<size_t>(count * kDepthStride)), panel(static_cast<size_t>(depth * kBlock));
    for (float& value : factors) value = normal();
    for (float& value : panel) value = normal();
    std::vector<float> c(static_cast<size_t>(count * stride), 1.0f), d(c);
    kernels.multiply(factors.data(), count, panel.data(), depth, c.data(), stride);
    portable.multiply(factors.data(), count, panel.data(), depth, d.data(), stride);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < stride; ++j) {
            double magnitude = 1, sum = 1;
            for (int64_t k = 0; k < depth && j < kBlock; ++k) {
                const double term = static_cast<double>(factors[static_cast<size_t>(i * kDepthStride + k)]) *
                                    panel[static_cast<size_t>(k * kBlock + j)];
                magnitude += std::fabs(term);
                sum += term;
            }
            products_of_matrices.note(c[static_cast<size_t>(i * stride + j)], d[static_cast<size_t>(i * stride + j)],
                                      magnitude);
            products_of_matrices.note(c[static_cast<size_t>(i * stride + j)], static_cast<float>(sum), magnitude);
        }
    products_of_matrices.print("multiply", format);

    if (format == Format::fp16) return;
    for (int planes = 1; planes <= 2; ++planes) {
        Worst products;
        const auto rounded = [&](const Kernels& its, std::vector<float>& out) {
            std::vector<int8_t> high(static_cast<size_t>(padded)), low(high);
            std::vector<float> scales(static_cast<size_t>(8 * room));
            std::vector<int32_t> starts(scales.size()), more(starts);
            const Rounded vector{planes, {high.data(), low.data()}, scales.data(), {starts.data(), more.data()}};
            its.round(format, x.data(), blocks_of(length), vector);
            its.dot_rounded(format, rows.data(), count, length, vector, out.data());
        };
        rounded(kernels, ours);
        rounded(portable, theirs);
        for (size_t i = 0; i < ours.size(); ++i) products.note(ours[i], theirs[i], magnitudes[i]);
        products.print(planes == 1 ? "dot_rounded_8" : "dot_rounded_16", format);
    }
}

void check_functions(const Kernels& kernels) {
    Worst exponentials, activations;
    std::vector<float> values(1003);
    for (float& value : values) value = -8.0f + 3.0f * normal();
    std::vector<float> ours(values), theirs(values);
    const float peak = 8.0f;
    const float total = kernels.exp_sum(ours.data(), static_cast<int64_t>(ours.size()), peak);
    const float expected = kPortableKernels.exp_sum(theirs.data(), static_cast<int64_t>(theirs.size()), peak);
    exponentials.note(total, expected, expected);
    for (size_t i = 0; i < ours.size(); ++i) exponentials.note(ours[i], theirs[i], theirs[i]);
    exponentials.print("exp_sum", Format::fp16);
    for (Activation kind : {Activation::none, Activation::relu, Activation::relu2, Activation::fatrelu, Activation::silu,
                            Activation::gelu, Activation::gelu_tanh, Activation::clamped_swish,
                            Activation::clamped_up}) {
        std::vector<float> mine(values), reference(values);
        for (size_t i = 0; i < mine.size(); i += 2) mine[i] = reference[i] = -values[i];
        kernels.activate(kind, 0.5f, mine.data(), static_cast<int64_t>(mine.size()));
        kPortableKernels.activate(kind, 0.5f, reference.data(), static_cast<int64_t>(reference.size()));
        for (size_t i = 0; i < mine.size(); ++i) activations.note(mine[i], reference[i], 1);
    }
    activations.print("activate", Format::fp16);
}

}  // namespace

int main() {
    for (Format format : {Format::fp16, Format::int8_group32, Format::int4_group32, Format::q4_k,
                          Format::q4_1, Format::q6_k, Format::q5_k, Format::q5_0, Format::q5_1, Format::iq4_nl,
                          Format::q3_k, Format::q2_k})
        for (int64_t count : {1, 4, 7, 9})
            for (int64_t length : {32, 72, 160, 768, 4096})
                if (block_values(format) == kBlock || length % block_values(format) == 0)
                    check(kNeonKernels, format, count, length);
    check_functions(kNeonKernels);
    return 0;
}
