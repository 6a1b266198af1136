// AVX-512 (F, BW, VL, DQ) without the byte products of VNNI.
#include "isa_avx512.h"
// The order of includes matters: the inner loops are written over Isa.
#include "kernels_pieces_avx512.h"
#include "kernels_body.h"
#include "kernels_integers.h"
#include "kernels_activations.h"
#include "kernels_tokens.h"
#include "kernels_matrix.h"
#include "kernels_bits.h"

namespace coldpress {
const Kernels kAvx512Kernels{"avx512", dot, axpy, round_blocks, dot_rounded, decode, exp_sum, activate,
                             multiply, add_common_bits};
}
