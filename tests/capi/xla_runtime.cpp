// As much of XLA's runtime as a handler of its typed FFI sees, without XLA: test_xla.py calls handlers through it, by ctypes.
#include <xla/ffi/api/c_api.h>

#include <cstdio>
#include <cstring>
#include <string>

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

namespace {

struct Buffer {
  int32_t dtype;
  int32_t rank;
  void* data;
  int64_t* dims;
};

struct Call {
  int32_t op;
  int32_t op_dtype;
  void* args;
  size_t args_bytes;
  void* fields;
  size_t field_count;
  int32_t attributes;  // which are there: 1 op, 2 args, 4 fields, 8 another one
  int32_t argument_count, result_count;
  Buffer* buffers;     // arguments, then results
  int32_t stage;
  int32_t device;
  void* stream;
  int32_t broken;      // 1: the device, 2: the stream cannot be asked for; 4: an XLA that does not know devices
};

int errors_alive = 0;
const Call* current = nullptr;

XLA_FFI_Error* make(XLA_FFI_Error_Code code, const char* message) {
  ++errors_alive;
  return new XLA_FFI_Error{code, message};
}
XLA_FFI_Error* create(XLA_FFI_Error_Create_Args* a) {
  return a->struct_size == XLA_FFI_Error_Create_Args_STRUCT_SIZE ? make(a->errc, a->message) : make(XLA_FFI_Error_Code_DATA_LOSS, "struct_size");
}
void destroy(XLA_FFI_Error_Destroy_Args* a) {
  --errors_alive;
  delete a->error;
}
XLA_FFI_Error* stream(XLA_FFI_Stream_Get_Args* a) {
  if (current->broken == 2 || a->struct_size != XLA_FFI_Stream_Get_Args_STRUCT_SIZE || a->ctx == nullptr) return make(XLA_FFI_Error_Code_UNIMPLEMENTED, "no stream");
  a->stream = current->stream;
  return nullptr;
}
XLA_FFI_Error* device(XLA_FFI_DeviceOrdinal_Get_Args* a) {
  if (current->broken == 1 || a->struct_size != XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE || a->ctx == nullptr) return make(XLA_FFI_Error_Code_UNIMPLEMENTED, "no device");
  a->device_ordinal = current->device;
  return nullptr;
}

XLA_FFI_Api api(int minor) {
  XLA_FFI_Api made{};
  made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  made.api_version.major_version = XLA_FFI_API_MAJOR;
  made.api_version.minor_version = minor;
  made.XLA_FFI_Error_Create = create;
  made.XLA_FFI_Error_Destroy = destroy;
  made.XLA_FFI_Stream_Get = stream;
  made.XLA_FFI_DeviceOrdinal_Get = device;
  return made;
}

}  // namespace

// What a handler says of itself to an XLA of version 0.minor, as major << 16 | minor; minor < 0: to one that asks without an api. -1 for an error.
extern "C" int metadata(XLA_FFI_Handler* handler, int minor, uint32_t* traits) {
  const XLA_FFI_Api with = api(minor);
  XLA_FFI_Metadata told{};
  told.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  told.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &told;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  frame.api = minor < 0 ? nullptr : &with;
  if (handler(&frame) != nullptr) return -1;
  *traits = told.traits;
  return told.api_version.major_version << 16 | told.api_version.minor_version;
}

extern "C" int newest_minor() { return XLA_FFI_API_MINOR; }

extern "C" int alive() { return errors_alive; }

// The XLA_FFI_Error_Code of the handler's error and its message, or 0.
extern "C" int call(XLA_FFI_Handler* handler, const Call* c, char* message, size_t n) {
  XLA_FFI_Api with = api(XLA_FFI_API_MINOR);
  if (c->broken == 4) with.struct_size = offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);
  current = c;

  XLA_FFI_Buffer buffers[32]{};
  XLA_FFI_ArgType arg_types[32];
  XLA_FFI_RetType ret_types[32];
  void* addresses[32];
  for (int i = 0; i < c->argument_count + c->result_count; ++i) {
    buffers[i].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffers[i].dtype = static_cast<XLA_FFI_DataType>(c->buffers[i].dtype);
    buffers[i].data = c->buffers[i].data;
    buffers[i].rank = c->buffers[i].rank;
    buffers[i].dims = c->buffers[i].dims;
    arg_types[i] = XLA_FFI_ArgType_BUFFER;
    ret_types[i] = XLA_FFI_RetType_BUFFER;
    addresses[i] = &buffers[i];
  }

  int32_t op = c->op;
  XLA_FFI_Scalar op_value{static_cast<XLA_FFI_DataType>(c->op_dtype), &op};
  XLA_FFI_Array args{XLA_FFI_DataType_U8, c->args_bytes, c->args}, fields{XLA_FFI_DataType_S32, c->field_count, c->fields};
  struct Named { const char* name; XLA_FFI_AttrType type; void* value; };
  const Named all[] = {{"op", XLA_FFI_AttrType_SCALAR, &op_value}, {"args", XLA_FFI_AttrType_ARRAY, &args}, {"fields", XLA_FFI_AttrType_ARRAY, &fields},
                       {"more", XLA_FFI_AttrType_SCALAR, &op_value}};
  XLA_FFI_ByteSpan names[4], *name_addresses[4];
  XLA_FFI_AttrType types[4];
  void* values[4];
  int count = 0;
  for (int i = 0; i < 4; ++i) {
    if ((c->attributes >> i & 1) == 0) continue;
    names[count] = {all[i].name, std::strlen(all[i].name)};
    name_addresses[count] = &names[count];
    types[count] = all[i].type;
    values[count++] = all[i].value;
  }

  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &with;
  frame.ctx = reinterpret_cast<decltype(frame.ctx)>(1);
  frame.stage = static_cast<XLA_FFI_ExecutionStage>(c->stage);
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, c->argument_count, arg_types, addresses};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, c->result_count, ret_types, addresses + c->argument_count};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, count, types, name_addresses, values};
  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return 0;
  std::snprintf(message, n, "%s", error->message.c_str());
  const int code = error->code;
  XLA_FFI_Error_Destroy_Args destroyed{};
  destroyed.error = error;
  destroy(&destroyed);
  return code;
}
