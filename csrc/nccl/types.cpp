#include "nccl/types.h"

#include <array>

#include "base/error.h"

namespace pyparallel::nccl {
namespace {

constexpr int oldest = version_code(2, 3, 5);
constexpr std::array<DataTypeInfo, data_type_count> data_types = {{
    {DataType::i8, "int8", 1, oldest},
    {DataType::u8, "uint8", 1, oldest},
    {DataType::i32, "int32", 4, oldest},
    {DataType::u32, "uint32", 4, oldest},
    {DataType::i64, "int64", 8, oldest},
    {DataType::u64, "uint64", 8, oldest},
    {DataType::f16, "float16", 2, oldest},
    {DataType::f32, "float32", 4, oldest},
    {DataType::f64, "float64", 8, oldest},
    {DataType::bf16, "bfloat16", 2, version_code(2, 10, 3)},
    {DataType::f8e4m3, "float8_e4m3fn", 1, version_code(2, 24, 3)},
    {DataType::f8e5m2, "float8_e5m2", 1, version_code(2, 24, 3)},
}};

// Moved as bytes; reduced as what follows only for bool.
constexpr std::array<Element, 6> moved_only = {{
    {DataType::u8, 1, true, true, "bool"},
    {DataType::u8, 2, false, false, "int16"},
    {DataType::u8, 2, false, false, "uint16"},
    {DataType::u8, 4, false, false, "complex32"},
    {DataType::u8, 8, false, false, "complex64"},
    {DataType::u8, 16, false, false, "complex128"},
}};

}  // namespace

const DataTypeInfo& info_of(DataType type) {
  const auto index = static_cast<std::size_t>(type);
  PYPARALLEL_REQUIRE(index < data_types.size(), "no NCCL data type has the value ", index,
                     "; 0 to ", data_types.size() - 1, " are known");
  return data_types[index];
}

std::optional<Element> element_named(std::string_view name) {
  for (const DataTypeInfo& info : data_types) {
    if (name == info.name) return Element{info.type, 1, true, false, info.name};
  }
  for (const Element& element : moved_only) {
    if (name == element.name) return element;
  }
  return std::nullopt;
}

Element element_of(DType dtype) {
  const auto element = element_named(name_of(dtype));
  PYPARALLEL_REQUIRE(element.has_value(), "NCCL cannot carry ", name_of(dtype));
  return *element;
}

RedOp red_op_of(ReduceOp op, const Element& element) {
  PYPARALLEL_REQUIRE(element.reducible, name_of(op), " of ", element.name,
                     ": NCCL moves this type but does not reduce it; convert it to int32 or a "
                     "floating type first");
  if (element.boolean) {
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::max:
      case ReduceOp::bor:
        return RedOp::max;
      case ReduceOp::product:
      case ReduceOp::min:
      case ReduceOp::band:
        return RedOp::min;
      default:
        throw InvalidArgument(str(name_of(op),
                                  " is not defined on bool; sum and max are OR, product "
                                  "and min are AND"));
    }
  }
  switch (op) {
    case ReduceOp::sum:
      return RedOp::sum;
    case ReduceOp::product:
      return RedOp::product;
    case ReduceOp::max:
      return RedOp::max;
    case ReduceOp::min:
      return RedOp::min;
    case ReduceOp::avg:
      return RedOp::avg;
    default:
      throw InvalidArgument(str("NCCL has no reduction ", name_of(op), " on ", element.name,
                                "; it has sum, avg, min, max, product and premul_sum"));
  }
}

std::string version_text(int code) {
  const Version v = version_of(code);
  return str(v.major, ".", v.minor, ".", v.patch);
}

}  // namespace pyparallel::nccl
