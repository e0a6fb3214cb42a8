// The ops as custom calls of XLA's typed FFI, for JAX and whatever else compiles through XLA. cula.h has the contract.
//
// One handler a platform serves every op: the attributes carry the args struct as it stands, so a field that is appended to it
// needs no line here. XLA's header (jaxlib's package has it) is C and declares only; nothing of XLA is linked. Releases differ in
// their API version: what is used here, the call frame and three functions, is the same in all from 0.1 on, and
// the sources compile against the header of each.
#include <xla/ffi/api/c_api.h>

#include <algorithm>
#include <atomic>

#include "api.h"
#include "driver.h"

namespace cula {
namespace {

constexpr int kOldestMinor = 1;

XLA_FFI_Error_Code code_of(cula_status status) noexcept {
  switch (status) {
    case CULA_ERR_INVALID_ARGUMENT: return XLA_FFI_Error_Code_INVALID_ARGUMENT;
    case CULA_ERR_UNSUPPORTED: return XLA_FFI_Error_Code_UNIMPLEMENTED;
    case CULA_ERR_NOT_FOUND: return XLA_FFI_Error_Code_NOT_FOUND;
    case CULA_ERR_ARTIFACT:
    case CULA_ERR_VERSION:
    case CULA_ERR_WORKSPACE: return XLA_FFI_Error_Code_FAILED_PRECONDITION;
    case CULA_ERR_OUT_OF_MEMORY: return XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    default: return XLA_FFI_Error_Code_INTERNAL;
  }
}

// nullptr for CULA_OK, else an error with the thread's message; XLA owns it.
XLA_FFI_Error* as_error(const XLA_FFI_Api& api, cula_status status) noexcept {
  if (status == CULA_OK) return nullptr;
  char message[1024];
  last_error(message, sizeof message);
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message;
  args.errc = code_of(status);
  return api.XLA_FFI_Error_Create(&args);
}

// XLA asks every handler for its API version and traits before it is used. Some releases take only their own version, so the
// answer is the newest one that both know; the oldest of them ask without an api.
bool answers_metadata(const XLA_FFI_CallFrame& frame, XLA_FFI_Handler_Traits traits) noexcept {
  if (frame.extension_start == nullptr || frame.extension_start->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata& metadata = *reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame.extension_start)->metadata;
  metadata.api_version.major_version = XLA_FFI_API_MAJOR;
  metadata.api_version.minor_version = frame.api != nullptr ? std::min<int>(XLA_FFI_API_MINOR, frame.api->api_version.minor_version) : kOldestMinor;
  metadata.traits = traits;
  return true;
}

const void* find_attribute(const XLA_FFI_Attrs& attrs, const char* name, XLA_FFI_AttrType type) noexcept {
  for (int64_t i = 0; i < attrs.size; ++i) {
    const XLA_FFI_ByteSpan& found = *attrs.names[i];
    if (found.len == std::strlen(name) && std::memcmp(found.ptr, name, found.len) == 0) return attrs.types[i] == type ? attrs.attrs[i] : nullptr;
  }
  return nullptr;
}

struct Attributes {
  int32_t op;
  const XLA_FFI_Array* args;
  const XLA_FFI_Array* fields;
};

cula_status read_attributes(const char* function, const XLA_FFI_Attrs& attrs, Attributes* out) noexcept {
  const auto* op = static_cast<const XLA_FFI_Scalar*>(find_attribute(attrs, "op", XLA_FFI_AttrType_SCALAR));
  out->args = static_cast<const XLA_FFI_Array*>(find_attribute(attrs, "args", XLA_FFI_AttrType_ARRAY));
  out->fields = static_cast<const XLA_FFI_Array*>(find_attribute(attrs, "fields", XLA_FFI_AttrType_ARRAY));
  if (attrs.size != 3 || op == nullptr || op->dtype != XLA_FFI_DataType_S32 || out->args == nullptr || out->args->dtype != XLA_FFI_DataType_U8 ||
      out->fields == nullptr || out->fields->dtype != XLA_FFI_DataType_S32) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: the attributes must be op (an s32), args (an array of u8) and fields (an array of s32)", function);
  }
  std::memcpy(&out->op, op->value, sizeof out->op);
  return CULA_OK;
}

cula_status dtype_of(const char* op, int64_t buffer, XLA_FFI_DataType dtype, DLDataType* out) noexcept {
  switch (dtype) {
    case XLA_FFI_DataType_F32: *out = {kDLFloat, 32, 1}; return CULA_OK;
    case XLA_FFI_DataType_BF16: *out = {kDLBfloat, 16, 1}; return CULA_OK;
    case XLA_FFI_DataType_F16: *out = {kDLFloat, 16, 1}; return CULA_OK;
    case XLA_FFI_DataType_F64: *out = {kDLFloat, 64, 1}; return CULA_OK;
    case XLA_FFI_DataType_S32: *out = {kDLInt, 32, 1}; return CULA_OK;
    case XLA_FFI_DataType_S64: *out = {kDLInt, 64, 1}; return CULA_OK;
    default: return fail(CULA_ERR_INVALID_ARGUMENT, "%s: buffer %lld has XLA's dtype %d, which no operand takes", op, static_cast<long long>(buffer), static_cast<int>(dtype));
  }
}

struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

cula_status read_workspace(const char* op, const XLA_FFI_Buffer& buffer, Workspace* out) noexcept {
  if (buffer.dtype != XLA_FFI_DataType_U8 || buffer.rank != 1 || buffer.dims[0] < 0) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: the workspace must be of dtype u8 and of rank 1", op);
  }
  *out = {buffer.data, static_cast<size_t>(buffer.dims[0])};
  return CULA_OK;
}

// The frame's buffers as the tensors of an args struct, and the call on them.
cula_status run_frame(const char* function, const XLA_FFI_CallFrame& frame, DLDevice device, void* stream) noexcept {
  Attributes given;
  CULA_TRY(read_attributes(function, frame.attrs, &given));
  const Op* op;
  CULA_TRY(find_op_checked(function, given.op, &op));

  alignas(8) unsigned char args[kMaxArgsSize];
  size_t struct_size = 0;
  if (given.args->size >= sizeof struct_size) std::memcpy(&struct_size, given.args->data, sizeof struct_size);
  if (struct_size != given.args->size || struct_size < op->tensors_end || struct_size > sizeof args) {
    return fail(CULA_ERR_VERSION, "%s: the attribute args has %zu bytes and struct_size %zu; it must be a whole %s", op->name, given.args->size, struct_size, op->args_name);
  }
  std::memcpy(args, given.args->data, struct_size);
  constexpr size_t kFirst = sizeof(size_t);
  std::memset(args + kFirst, 0, op->tensors_end - kFirst);  // addresses of the process that made the program

  constexpr int32_t kWorkspace = -1;  // in the attribute fields
  Workspace workspace;
  DLTensor tensors[CULA_MAX_OBJECTS];
  const int64_t buffers = frame.args.size + frame.rets.size;
  const int64_t known_fields = static_cast<int64_t>((op->tensors_end - kFirst) / sizeof(const DLTensor*));
  if (static_cast<int64_t>(given.fields->size) != buffers) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: the attribute fields has %zu numbers for %lld buffers", op->name, given.fields->size, static_cast<long long>(buffers));
  }
  for (int64_t i = 0; i < buffers; ++i) {
    const bool result = i >= frame.args.size;
    const int64_t at = result ? i - frame.args.size : i;
    if (result ? frame.rets.types[at] != XLA_FFI_RetType_BUFFER : frame.args.types[at] != XLA_FFI_ArgType_BUFFER) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: operand %lld is no buffer", op->name, static_cast<long long>(i));
    }
    const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(result ? frame.rets.rets[at] : frame.args.args[at]);
    int32_t field;
    std::memcpy(&field, static_cast<const char*>(given.fields->data) + i * sizeof field, sizeof field);
    if (field == kWorkspace && result) {
      CULA_TRY(read_workspace(op->name, buffer, &workspace));
      continue;
    }
    if (field < 0 || field >= known_fields) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: buffer %lld is for field %d; %s has tensors 0 to %lld", op->name, static_cast<long long>(i), field, op->args_name,
                  static_cast<long long>(known_fields - 1));
    }
    DLTensor& tensor = tensors[field];
    const DLTensor* address = &tensor;
    unsigned char* member = args + kFirst + field * sizeof address;
    const DLTensor* before;
    std::memcpy(&before, member, sizeof before);
    if (before != nullptr && before->data != buffer.data) {
      return fail(CULA_ERR_INTERNAL, "%s: field %d is updated in place, and XLA gave its argument and its result different memory: the call needs output_operand_aliases", op->name, field);
    }
    tensor = {buffer.data, device, static_cast<int32_t>(buffer.rank), {}, buffer.dims, nullptr, 0};
    CULA_TRY(dtype_of(op->name, i, buffer.dtype, &tensor.dtype));
    std::memcpy(member, &address, sizeof address);
  }
  return cula_run(given.op, args, workspace.data, workspace.bytes, stream);
}

// ------------------------------------------------------------------------------------------------------------------ CUDA

// Devices whose kernels are loaded in the primary context, which is XLA's: a program that called cula_prepare with a context of its
// own current has them elsewhere.
std::atomic<uint64_t> prepared{0};

cula_status prepare_once(int32_t device) {
  if (device >= 0 && device < 64 && (prepared.load(std::memory_order_acquire) >> device & 1) != 0) return CULA_OK;
  CULA_TRY(driver::prepare(device));
  prepared.fetch_or(uint64_t{1} << device, std::memory_order_release);
  return CULA_OK;
}

// Destroys an error that this library got, and makes it ours.
cula_status ask(const char* function, const XLA_FFI_Api& api, XLA_FFI_Error* error, const char* what) noexcept {
  if (error == nullptr) return CULA_OK;
  XLA_FFI_Error_Destroy_Args args{};
  args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  args.error = error;
  api.XLA_FFI_Error_Destroy(&args);
  return fail(CULA_ERR_INTERNAL, "%s: XLA does not tell the %s of the call", function, what);
}

cula_status device_of(const char* function, const XLA_FFI_CallFrame& frame, int32_t* device) noexcept {
  const XLA_FFI_Api& api = *frame.api;
  if (api.struct_size < XLA_FFI_STRUCT_SIZE(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get)) {
    return fail(CULA_ERR_VERSION, "%s: this XLA is too old: it has no XLA_FFI_DeviceOrdinal_Get", function);
  }
  XLA_FFI_DeviceOrdinal_Get_Args args{};
  args.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
  args.ctx = frame.ctx;
  CULA_TRY(ask(function, api, api.XLA_FFI_DeviceOrdinal_Get(&args), "device"));
  *device = args.device_ordinal;
  return CULA_OK;
}

cula_status stream_of(const char* function, const XLA_FFI_CallFrame& frame, void** stream) noexcept {
  XLA_FFI_Stream_Get_Args args{};
  args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
  args.ctx = frame.ctx;
  CULA_TRY(ask(function, *frame.api, frame.api->XLA_FFI_Stream_Get(&args), "stream"));
  *stream = args.stream;
  return CULA_OK;
}

cula_status prepare_frame(const char* function, const XLA_FFI_CallFrame& frame, int32_t* device) noexcept {
  CULA_API_BEGIN
  CULA_TRY(device_of(function, frame, device));
  return prepare_once(*device);
  CULA_API_END(function)
}

cula_status run_on_cuda(const char* function, const XLA_FFI_CallFrame& frame) noexcept {
  int32_t device;
  void* stream;
  CULA_TRY(prepare_frame(function, frame, &device));  // already done, unless this XLA skips the stage that is for it
  CULA_TRY(stream_of(function, frame, &stream));
  return run_frame(function, frame, {kDLCUDA, device}, stream);
}

}  // namespace
}  // namespace cula

using namespace cula;

extern "C" {

XLA_FFI_Error* cula_xla_cpu(XLA_FFI_CallFrame* frame) noexcept {
  if (answers_metadata(*frame, 0)) return nullptr;
  return as_error(*frame->api, run_frame("cula_xla_cpu", *frame, {kDLCPU, 0}, nullptr));
}

XLA_FFI_Error* cula_xla_cuda(XLA_FFI_CallFrame* frame) noexcept {
  // The launches of a call follow from shapes, addresses and attributes alone, so XLA may keep them in a CUDA graph.
  if (answers_metadata(*frame, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE)) return nullptr;
  return as_error(*frame->api, run_on_cuda("cula_xla_cuda", *frame));
}

XLA_FFI_Error* cula_xla_cuda_initialize(XLA_FFI_CallFrame* frame) noexcept {
  if (answers_metadata(*frame, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE)) return nullptr;
  int32_t device;
  return as_error(*frame->api, prepare_frame("cula_xla_cuda_initialize", *frame, &device));
}

}  // extern "C"
