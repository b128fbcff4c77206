// The attention kernels for AVX-512 F and BW.
#if defined(__x86_64__)
#include "torch/attention_backward.h"
#include "torch/attention_forward.h"

namespace pyparallel::dist::attention {

const Kernels kAvx512 = {"avx512", forward_scratch, backward_scratch, forward, backward};

}  // namespace pyparallel::dist::attention
#endif
