// The attention kernels for AVX2, FMA and F16C.
#if defined(__x86_64__)
#include "torch/attention_backward.h"
#include "torch/attention_forward.h"

namespace pyparallel::dist::attention {

const Kernels kAvx2 = {"avx2", forward_scratch, backward_scratch, forward, backward};

}  // namespace pyparallel::dist::attention
#endif
