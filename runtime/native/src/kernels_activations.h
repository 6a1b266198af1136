// Activation functions in plain loops that the compiler turns into vectors. They follow runtime/decoder/arithmetic.py.
// Include after kernels_body.h; like there, everything is in an anonymous namespace.

namespace coldpress {
namespace {

// 1 / (1 + exp(-x)), correct even if exp(-x) overflows.
inline float sigmoid(float x) {
    const float small = exp_negative(x < 0.0f ? x : -x), share = 1.0f / (1.0f + small);
    return x < 0.0f ? small * share : share;
}

// A rational approximation, odd powers over even ones, on [-4, 4]; beyond, the result is 1 to the last bit.
inline float erf_of(float x) {
    const float clamped = x < -4.0f ? -4.0f : x > 4.0f ? 4.0f : x, square = clamped * clamped;
    float above = -2.72614225801306e-10f;
    above = above * square + 2.77068142495902e-08f;
    above = above * square - 2.10102402082508e-06f;
    above = above * square - 5.69250639462346e-05f;
    above = above * square - 7.34990630326855e-04f;
    above = above * square - 2.95459980854025e-03f;
    above = above * square - 1.60960333262415e-02f;
    float below = -1.45660718464996e-05f;
    below = below * square - 2.13374055278905e-04f;
    below = below * square - 1.68282697438203e-03f;
    below = below * square - 7.37332916720468e-03f;
    below = below * square - 1.42647390514189e-02f;
    return clamped * above / below;
}

// Comparisons are written so that not-a-number stays not-a-number.
inline float relu_of(float x) { return x < 0.0f ? 0.0f : x; }

template <typename Function>
inline void each(float* values, int64_t count, Function function) {
    for (int64_t i = 0; i < count; ++i) values[i] = function(values[i]);
}

void activate(Activation kind, float threshold, float* values, int64_t count) {
    switch (kind) {
        case Activation::none:
            return;
        case Activation::relu:
            return each(values, count, relu_of);
        case Activation::relu2:
            return each(values, count, [](float x) { return relu_of(x) * relu_of(x); });
        case Activation::fatrelu:
            return each(values, count, [threshold](float x) { return x < threshold ? 0.0f : x; });
        case Activation::silu:
            return each(values, count, [](float x) { return x * sigmoid(x); });
        case Activation::gelu:
            return each(values, count, [](float x) { return 0.5f * x * (1.0f + erf_of(x * 0.70710678f)); });
        case Activation::gelu_tanh:  // 1 + tanh(u) = 2 sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
            return each(values, count, [](float x) {
                return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
            });
        case Activation::clamped_swish:
            return each(values, count, [threshold](float x) {
                const float clamped = x > threshold ? threshold : x;
                return clamped * sigmoid(1.702f * clamped);
            });
        case Activation::clamped_up:
            return each(values, count, [threshold](float x) {
                return 1.0f + (x > threshold ? threshold : x < -threshold ? -threshold : x);
            });
    }
}

}  // namespace
}  // namespace coldpress
