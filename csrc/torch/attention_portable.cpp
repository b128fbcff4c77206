// The attention kernels for what every CPU of the target has.
#include "torch/attention_backward.h"
#include "torch/attention_forward.h"

namespace pyparallel::dist::attention {

const Kernels kPortable = {"portable", forward_scratch, backward_scratch, forward, backward};

}  // namespace pyparallel::dist::attention
