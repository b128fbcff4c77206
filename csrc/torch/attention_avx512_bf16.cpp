// The attention kernels for AVX-512 with dot products of bfloat16 pairs; for bfloat16 alone.
#if defined(__x86_64__)
#define PYPARALLEL_ATTENTION_BF16 1
#include "torch/attention_backward.h"
#include "torch/attention_forward.h"

namespace pyparallel::dist::attention {

const Kernels kAvx512Bf16 = {"avx512 bf16", forward_scratch, backward_scratch, forward, backward};

}  // namespace pyparallel::dist::attention
#endif
