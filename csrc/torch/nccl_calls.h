// What the files with the CUDA half's calls share.
#pragma once

#include "torch/nccl_backend.h"
#include "torch/start.h"

namespace pyparallel::dist {

inline nccl::Element nccl_element(Element element) { return nccl::element_of(element.dtype); }

template <typename Opts>
NcclBackend::How NcclBackend::how_of(const Opts& opts) {
  return {caller_waits(opts), opts.timeout};
}

}  // namespace pyparallel::dist
