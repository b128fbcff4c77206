// One number in an element type of NCCL's, rounded to nearest even.
#pragma once

#include <cstddef>

#include "nccl/types.h"

namespace pyparallel::nccl {

struct Scalar {
  alignas(8) unsigned char bytes[8] = {};

  // Throws InvalidArgument for types that hold no fraction.
  static Scalar of(double value, const Element& element);
};

}  // namespace pyparallel::nccl
