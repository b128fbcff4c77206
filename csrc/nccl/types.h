// Element types and reductions as NCCL counts them, and the way there from the core's own.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "base/dtype.h"
#include "nccl/abi.h"

namespace pyparallel::nccl {

// An element as the caller sees it: NCCL type and how many of them make one element. Types that
// NCCL does not reduce (int16, complex) can still be moved, as bytes.
struct Element {
  DataType type = DataType::u8;
  std::size_t units = 1;       // of `type` per element
  bool reducible = true;       // whether arithmetic on `type` is arithmetic on the element
  bool boolean = false;        // 0 or 1 in a byte: sum and max are OR, product and min are AND
  const char* name = "uint8";  // for messages
};

struct DataTypeInfo {
  DataType type;
  const char* name;  // torch's name without "torch."
  std::size_t bytes;
  int since;  // version code of the first NCCL release that has it
};

// All NCCL types; `type` is the index.
const DataTypeInfo& info_of(DataType type);
constexpr int data_type_count = 12;

// By name ("float32", "bfloat16", "float8_e4m3fn", "bool", "int16", "complex64"); none when
// unknown.
std::optional<Element> element_named(std::string_view name);
Element element_of(DType dtype);

// Throws InvalidArgument naming what NCCL has when it has no such reduction for the element.
// premul_sum is not among them: it needs a PreMulSum (communicator.h).
RedOp red_op_of(ReduceOp op, const Element& element);

// "2.27.3" <-> 22703; codes up to 2.8 have two digits less (2.8.4 is 2804).
constexpr int version_code(int major, int minor, int patch) {
  return major <= 2 && minor <= 8 ? major * 1000 + minor * 100 + patch
                                  : major * 10000 + minor * 100 + patch;
}
struct Version {
  int major = 0;
  int minor = 0;
  int patch = 0;
};
constexpr Version version_of(int code) {
  return code < 10000 ? Version{code / 1000, code % 1000 / 100, code % 100}
                      : Version{code / 10000, code % 10000 / 100, code % 100};
}
std::string version_text(int code);

// Of `count` elements. Throws InvalidArgument where that is more than any memory holds.
std::size_t bytes_of(std::size_t count, const Element& element);

}  // namespace pyparallel::nccl
