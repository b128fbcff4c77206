#include "nccl/config.h"

#include "base/error.h"
#include "nccl/library.h"
#include "nccl/types.h"

namespace pyparallel::nccl {
namespace {

int value_of(int field) { return field; }
const char* value_of(const std::string& field) { return field.c_str(); }

// How many bytes the record had in a release: up to the first field that came later, as a struct of
// that time was padded.
std::size_t size_in(int version) {
  std::size_t end = offsetof(ConfigRecord, blocking);
#define PYPARALLEL_NCCL_FIELD_END(name, type, major, minor, patch)   \
  if (version >= version_code(major, minor, patch)) {                \
    end = offsetof(ConfigRecord, name) + sizeof(ConfigRecord::name); \
  }
  PYPARALLEL_NCCL_CONFIG_FIELDS(PYPARALLEL_NCCL_FIELD_END)
#undef PYPARALLEL_NCCL_FIELD_END
  constexpr std::size_t alignment = alignof(ConfigRecord);
  return (end + alignment - 1) / alignment * alignment;
}

}  // namespace

bool Config::empty() const {
  bool any = false;
#define PYPARALLEL_NCCL_FIELD_ANY(name, type, major, minor, patch) any = any || name.has_value();
  PYPARALLEL_NCCL_CONFIG_FIELDS(PYPARALLEL_NCCL_FIELD_ANY)
#undef PYPARALLEL_NCCL_FIELD_ANY
  return !any;
}

ConfigRecord Config::record(const Library& library) const {
  ConfigRecord record;
  int version = version_code(2, 14, 3);
  std::string beyond;
#define PYPARALLEL_NCCL_FIELD_SET(name, type, major, minor, patch)                            \
  if (name.has_value()) {                                                                     \
    constexpr int since = version_code(major, minor, patch);                                  \
    record.name = value_of(*name);                                                            \
    version = std::max(version, since);                                                       \
    if (since > library.version()) {                                                          \
      beyond += str(beyond.empty() ? "" : ", ", #name, " (since ", version_text(since), ")"); \
    }                                                                                         \
  }
  PYPARALLEL_NCCL_CONFIG_FIELDS(PYPARALLEL_NCCL_FIELD_SET)
#undef PYPARALLEL_NCCL_FIELD_SET
  if (!beyond.empty()) {
    throw Unsupported(str("configuration fields that this NCCL would ignore: ", beyond, "; found ",
                          library.describe()));
  }
  record.version = static_cast<unsigned>(version);
  record.size = size_in(version);
  return record;
}

}  // namespace pyparallel::nccl
