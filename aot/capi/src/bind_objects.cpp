// cula_bind_objects: tensors of Python objects through a DLPack exchange API. Calls into Python only through the functions of
// that API; this library does not link to Python.
#include "api.h"

namespace cula {
namespace {

// The API in the version that dlpack.h here describes; producers may offer a newer one with a chain of older ones.
const DLPackExchangeAPI* supported_api(const void* given) noexcept {
  const DLPackExchangeAPIHeader* header = static_cast<const DLPackExchangeAPIHeader*>(given);
  while (header != nullptr && header->version.major != DLPACK_MAJOR_VERSION) header = header->prev_api;
  return reinterpret_cast<const DLPackExchangeAPI*>(header);
}

cula_status check_objects(const Op& op, const uint16_t* field_offsets, int32_t count, void* const* objects, const DLTensor* tensors) noexcept {
  if (count < 0 || count > CULA_MAX_OBJECTS) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: cula_bind_objects got %d objects; must be 0 to %d", op.name, count, CULA_MAX_OBJECTS);
  }
  if (count > 0 && (field_offsets == nullptr || objects == nullptr || tensors == nullptr)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: cula_bind_objects: field_offsets, objects or tensors is NULL", op.name);
  }
  for (int32_t i = 0; i < count; ++i) {
    const size_t at = field_offsets[i];
    if (at < sizeof(size_t) || at + sizeof(const DLTensor*) > op.tensors_end || at % alignof(const DLTensor*) != 0) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: cula_bind_objects: offset %zu of object %d is no tensor field of %s", op.name, at, i, op.args_name);
    }
    if (objects[i] == nullptr) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: cula_bind_objects: object %d is NULL", op.name, i);
  }
  return CULA_OK;
}

// Fills the tensor fields of args. first: the first tensor, or NULL.
cula_status read_objects(const Op& op, const DLPackExchangeAPI& api, void* args, const uint16_t* field_offsets, int32_t count,
                         void* const* objects, const void* none, DLTensor* tensors, const DLTensor** first) {
  *first = nullptr;
  for (int32_t i = 0; i < count; ++i) {
    const DLTensor* tensor = nullptr;
    if (objects[i] != none) {
      if (api.dltensor_from_py_object_no_sync(objects[i], &tensors[i]) != 0) {
        return fail(CULA_ERR_INVALID_ARGUMENT, "%s: object %d could not be read through its DLPack exchange API; the Python exception says why", op.name, i);
      }
      tensor = &tensors[i];
      if (*first == nullptr) *first = tensor;
    }
    std::memcpy(static_cast<char*>(args) + field_offsets[i], &tensor, sizeof tensor);
  }
  return CULA_OK;
}

}  // namespace
}  // namespace cula

using namespace cula;

extern "C" cula_status cula_bind_objects(cula_op op, void* args, const void* exchange_api, const uint16_t* field_offsets, int32_t object_count,
                                         void* const* objects, void* none, DLTensor* tensors, void* workspace, size_t workspace_bytes,
                                         cula_launches* launches) noexcept {
  CULA_API_BEGIN
  constexpr size_t kSize = CULA_SIZEOF(cula_launches);
  const Op* row;
  CULA_TRY(find_op_checked("cula_bind_objects", op, &row));
  CULA_TRY(check_struct("cula_bind_objects", "cula_launches", launches, kSize, kSize));
  CULA_TRY(check_struct("cula_bind_objects", row->args_name, args, row->first_size, row->size));
  CULA_TRY(check_objects(*row, field_offsets, object_count, objects, tensors));
  if (exchange_api == nullptr) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: cula_bind_objects: exchange_api is NULL", row->name);
  const DLPackExchangeAPI* api = supported_api(exchange_api);
  if (api == nullptr) {
    return fail(CULA_ERR_UNSUPPORTED, "%s: the DLPack exchange API has no version %d", row->name, DLPACK_MAJOR_VERSION);
  }
  if (api->dltensor_from_py_object_no_sync == nullptr) {
    return fail(CULA_ERR_UNSUPPORTED, "%s: the DLPack exchange API offers no dltensor_from_py_object_no_sync", row->name);
  }

  const DLTensor* first;
  CULA_TRY(read_objects(*row, *api, args, field_offsets, object_count, objects, none, tensors, &first));
  if (first != nullptr && first->device.device_type == kDLCPU) {
    launches->count = 0;
    launches->device_type = kDLCPU;
    launches->device_id = 0;
    launches->storage_used = 0;
    return CULA_OK;
  }
  void* stream = launches->stream;
  if (first != nullptr && stream == reinterpret_cast<void*>(-1)) {
    if (api->current_work_stream == nullptr || api->current_work_stream(first->device.device_type, first->device.device_id, &stream) != 0) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: the DLPack exchange API gave no current stream; the Python exception says why", row->name);
    }
  }
  Plan plan;
  CULA_TRY(plan_call("cula_bind_objects", *row, args, launches->arch, launches->sm_count, workspace, &plan));
  launches->stream = stream;  // also for who was refused for want of a workspace, and allocates it on that stream
  CULA_TRY(check_workspace(*row, plan, workspace, workspace_bytes));
  fill_launches(plan, launches);
  return CULA_OK;
  CULA_API_END("cula_bind_objects")
}
