// DLTensors as the plans see them: normalised once, checked once, with messages that name the operand.
//
// What is accepted
//   - rank 0 to 8, extents >= 0; strides NULL means compact. The stride of an extent of 1 is not looked at and becomes 0, so that
//     the odd values that frameworks put there reach no check and no kernel.
//   - Zero and negative strides are legal where an operator says that a stride is free and the tensor is only read: kernels
//     compute addresses with signed 64-bit strides. An output may have negative strides, but no two of its elements may be the
//     same memory (require_distinct).
//   - Every address of the tensor must fit in 64 bits; the arithmetic here cannot overflow.
//   - data may be NULL only if there are no elements. A tensor of a tracing framework (torch's FakeTensor, meta) has NULL data
//     and elements; launching with it would write to address 0.
#pragma once
#include <cstdint>

#include "error.h"
#include "kernel_table.h"
#include "plan.h"

namespace cula {

// Element types of operands. The first three are the codes of DType.
enum class Element : uint8_t { f32 = 0, bf16 = 1, fp16 = 2, absent = 3, i32 = 4, i64 = 5 };

// Sets of them, by bit.
constexpr uint32_t kFloats = 0b111;
constexpr uint32_t kFloat32 = 0b001;
constexpr uint32_t kStates = 0b011;    // float32, bf16
constexpr uint32_t kIndices = 0b110000;

constexpr int kMaxRank = 8;

// No member initialisers: a call has up to 13 of these on its stack, and the arrays of absent ones are never touched.
struct Tensor {
  const char* name;
  const char* data;     // nullptr if absent or without elements
  Element dtype;
  uint8_t itemsize;
  int32_t rank;
  int64_t shape[kMaxRank];
  int64_t stride[kMaxRank];  // elements; 0 where the extent is 1
  int64_t elements;
  uintptr_t begin, end;      // bytes that the elements lie in; equal if there are none
};

// Text of an error message.
struct Text {
  char s[192];
};
Text shape_text(int32_t rank, const int64_t* shape) noexcept;  // "[4,8,96]"
inline Text shape_text(const Tensor& t) noexcept { return shape_text(t.rank, t.shape); }
const char* element_name(Element e) noexcept;                  // "float32"

// Reads the operands of one call and holds them to one device.
class Operands {
 public:
  explicit Operands(const Request& request) noexcept : op_(request.name) {}

  // A tensor that must be there, of one of `dtypes`.
  cula_status required(const char* name, const DLTensor* given, uint32_t dtypes, Tensor* out) noexcept {
    if (__builtin_expect(given == nullptr, 0)) return missing(name);
    return read(name, given, dtypes, out);
  }
  // A tensor that may be absent: then out->dtype is absent and out->data is nullptr.
  cula_status optional(const char* name, const DLTensor* given, uint32_t dtypes, Tensor* out) noexcept {
    if (given != nullptr) return read(name, given, dtypes, out);
    out->name = name;
    out->data = nullptr;
    out->dtype = Element::absent;
    out->itemsize = 0;
    out->begin = out->end = 0;
    return CULA_OK;
  }
  // A tensor that this call has no use for: an operand is never ignored. `why` completes "... is given, but ".
  cula_status forbidden(const char* name, const DLTensor* given, const char* why) noexcept {
    return given == nullptr ? CULA_OK : fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is given, but %s", op_, name, why);
  }

  int32_t device_type() const noexcept { return device_type_; }
  int32_t device_id() const noexcept { return device_id_; }

 private:
  cula_status missing(const char* name) noexcept;
  cula_status read(const char* name, const DLTensor* given, uint32_t dtypes, Tensor* out) noexcept;
  // The first operand's device, or one that is not spelled as the first one's.
  cula_status other_device(const char* name, const DLDevice& device) noexcept;

  const char* op_;
  const char* first_ = nullptr;  // operand that set the device
  int32_t device_type_ = 0;
  int32_t device_id_ = 0;
};

inline bool present(const Tensor& t) noexcept { return t.dtype != Element::absent; }

// Where rows stand in a tensor: shape [N, ...] or, for an operand of one token a row, [N,1,...] or [1,N,...].
struct Rows {
  int64_t n, stride;
  const int64_t* shape;    // of the dimensions behind the row
  const int64_t* strides;
};
cula_status rows_with_unit(const char* op, const Tensor& t, int32_t tail, const char* layout, Rows* rows) noexcept;
// `tail` dimensions behind the row; `layout` for the message, for example "[N,H,K]".
inline cula_status rows_of(const char* op, const Tensor& t, int32_t tail, const char* layout, Rows* rows) noexcept {
  if (__builtin_expect(t.rank != tail + 1, 0)) return rows_with_unit(op, t, tail, layout, rows);
  *rows = {t.shape[0], t.stride[0], t.shape + 1, t.stride + 1};
  return CULA_OK;
}

// The tensor's last stride is 1 (or its last extent is 1, or there are no elements).
[[gnu::cold]] cula_status strided(const char* op, const Tensor& t) noexcept;
inline cula_status require_unit_stride(const char* op, const Tensor& t) noexcept {
  const bool unit = t.rank == 0 || t.stride[t.rank - 1] == 1 || t.shape[t.rank - 1] <= 1 || t.elements == 0;
  return __builtin_expect(unit, 1) ? CULA_OK : strided(op, t);
}
// Elements are adjacent in row-major order, and there are `count` of them; `meaning` for the message, for example "HV".
cula_status require_vector(const char* op, const Tensor& t, int64_t count, const char* meaning) noexcept;
// No two elements share memory: strides, from small to large, each step over all that the smaller ones span.
cula_status require_distinct(const char* op, const Tensor& t) noexcept;

// Whether two tensors whose byte ranges meet share an element. Views of the same period (columns of one fused row in one or more
// batches, layers of one pool) are told apart; anything else whose ranges meet counts as overlapping.
bool interleaved_overlap(const Tensor& a, const Tensor& b) noexcept;
inline bool overlaps(const Tensor& a, const Tensor& b) noexcept {
  return a.begin < b.end && b.begin < a.end && interleaved_overlap(a, b);
}
[[gnu::cold]] cula_status overlap(const char* op, const Tensor& written, const Tensor& other) noexcept;
// `written` shares no memory with `other`.
inline cula_status require_disjoint(const char* op, const Tensor& written, const Tensor& other) noexcept {
  return __builtin_expect(overlaps(written, other), 0) ? overlap(op, written, other) : CULA_OK;
}

// Base and the strides of the first `rank - 1` dimensions are multiples of 16 bytes.
bool aligned16(const Tensor& t) noexcept;

// arch and multiprocessor count to plan for. CULA_ARCH_DEVICE asks the driver about the operands' device; a named arch does not.
cula_status resolve_target(const Request& request, const Operands& operands, Target* target) noexcept;

}  // namespace cula
