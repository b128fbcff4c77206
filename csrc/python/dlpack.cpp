#include "python/dlpack.h"

#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace py = pybind11;

namespace pyparallel::python {
namespace {

// The published layout of DLPack, unversioned and 1.x.
struct DlTensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t ndim;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: compact, row by row
  std::uint64_t byte_offset;
};
static_assert(sizeof(DlTensor) == 48);

struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};

struct DlManagedTensorVersioned {
  std::uint32_t major, minor;
  void* context;
  void (*deleter)(DlManagedTensorVersioned*);
  std::uint64_t flags;
  DlTensor tensor;
};
constexpr std::uint64_t flag_read_only = 1;
constexpr std::uint32_t known_major = 1;

bool compact(const DlTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 0) return true;
  }
  std::int64_t expected = 1;
  for (int i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] == 1) continue;  // its stride is never used
    if (tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

}  // namespace

py::tuple describe_dlpack(const py::capsule& capsule) {
  const char* name = capsule.name();
  const DlTensor* tensor = nullptr;
  bool read_only = false;
  if (name != nullptr && std::strcmp(name, "dltensor") == 0) {
    tensor = &capsule.get_pointer<DlManagedTensor>()->tensor;
  } else if (name != nullptr && std::strcmp(name, "dltensor_versioned") == 0) {
    const auto* managed = capsule.get_pointer<DlManagedTensorVersioned>();
    PYPARALLEL_REQUIRE(managed->major == known_major, "a DLPack capsule of version ",
                       managed->major, ".", managed->minor, "; version ", known_major, " is known");
    tensor = &managed->tensor;
    read_only = (managed->flags & flag_read_only) != 0;
  } else {
    throw InvalidArgument(
        str("not a fresh DLPack capsule: its name is ", name != nullptr ? name : "empty"));
  }
  PYPARALLEL_REQUIRE(tensor->ndim >= 0 && (tensor->ndim == 0 || tensor->shape != nullptr),
                     "a DLPack capsule with ", tensor->ndim, " dimensions and no shape");
  py::tuple shape(tensor->ndim);
  for (int i = 0; i < tensor->ndim; ++i) shape[i] = tensor->shape[i];
  const auto address = reinterpret_cast<std::uintptr_t>(tensor->data) + tensor->byte_offset;
  return py::make_tuple(address, shape, compact(*tensor), tensor->code, tensor->bits, tensor->lanes,
                        tensor->device_type, tensor->device_id, read_only);
}

}  // namespace pyparallel::python
