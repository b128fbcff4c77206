#include "python/dlpack.h"

#include <cstdint>
#include <cstring>
#include <utility>

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

py::capsule to_dlpack(void* data, std::size_t bytes, int cuda_device, std::shared_ptr<void> owner) {
  struct Exported {
    DlManagedTensor managed;
    std::int64_t shape;
    std::shared_ptr<void> owner;
  };
  constexpr std::int32_t cpu = 1, cuda = 2;
  constexpr std::uint8_t unsigned_integer = 1;
  auto exported = std::make_unique<Exported>();
  exported->shape = static_cast<std::int64_t>(bytes);
  exported->owner = std::move(owner);
  DlTensor& tensor = exported->managed.tensor;
  tensor = {};
  tensor.data = data;
  tensor.device_type = cuda_device >= 0 ? cuda : cpu;
  tensor.device_id = cuda_device >= 0 ? cuda_device : 0;
  tensor.ndim = 1;
  tensor.code = unsigned_integer;
  tensor.bits = 8;
  tensor.lanes = 1;
  tensor.shape = &exported->shape;
  exported->managed.context = exported.get();
  exported->managed.deleter = [](DlManagedTensor* self) {
    delete static_cast<Exported*>(self->context);
  };
  // A capsule that nobody took still owns: a consumer renames it when it does.
  PyObject* capsule = PyCapsule_New(&exported->managed, "dltensor", [](PyObject* self) {
    if (!PyCapsule_IsValid(self, "dltensor")) return;
    auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(self, "dltensor"));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw py::error_already_set();
  (void)exported.release();
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace pyparallel::python
