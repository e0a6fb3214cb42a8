#include "tensor.h"

#include <cstdio>
#include <cstdlib>

#include "driver.h"
#include "names.h"

namespace cula {
namespace {

// "cuda:0"
Text device_text(int32_t type, int32_t id) noexcept {
  Text text;
  const char* name = device_type_name(type);
  if (name == nullptr) {
    std::snprintf(text.s, sizeof text.s, "device type %d", type);
  } else if (type == kDLCPU) {
    std::snprintf(text.s, sizeof text.s, "cpu");
  } else {
    std::snprintf(text.s, sizeof text.s, "%s:%d", name, id);
  }
  return text;
}

// "float64", "int8x4"
Text dtype_text(const DLDataType& t) noexcept {
  static constexpr const char* kCodes[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  Text text;
  const char* code = t.code < sizeof kCodes / sizeof *kCodes ? kCodes[t.code] : nullptr;
  const int used = code != nullptr ? std::snprintf(text.s, sizeof text.s, "%s%d", code, t.bits)
                                   : std::snprintf(text.s, sizeof text.s, "DLPack code %d with %d bits", t.code, t.bits);
  if (t.lanes != 1) std::snprintf(text.s + used, sizeof text.s - used, "x%d", t.lanes);
  return text;
}

// "bf16, fp16 or float32"
Text set_text(uint32_t dtypes) noexcept {
  static constexpr Element kOrder[] = {Element::bf16, Element::fp16, Element::f32, Element::i32, Element::i64};
  Text text;
  text.s[0] = 0;
  int count = 0, done = 0;
  for (Element e : kOrder) count += dtypes >> static_cast<int>(e) & 1;
  for (Element e : kOrder) {
    if (!(dtypes >> static_cast<int>(e) & 1)) continue;
    ++done;
    const size_t used = std::strlen(text.s);
    std::snprintf(text.s + used, sizeof text.s - used, "%s%s", done == 1 ? "" : done == count ? " or " : ", ", element_name(e));
  }
  return text;
}

constexpr uint32_t word(uint32_t code, uint32_t bits, uint32_t lanes) { return code | bits << 8 | lanes << 16; }

Element element_of(const DLDataType& t) noexcept {
  switch (word(t.code, t.bits, t.lanes)) {
    case word(kDLFloat, 32, 1): return Element::f32;
    case word(kDLBfloat, 16, 1): return Element::bf16;
    case word(kDLFloat, 16, 1): return Element::fp16;
    case word(kDLInt, 32, 1): return Element::i32;
    case word(kDLInt, 64, 1): return Element::i64;
    default: return Element::absent;
  }
}

constexpr uint8_t kItemsize[] = {4, 2, 2, 0, 4, 8};

bool is_gpu(int32_t type) noexcept { return type == kDLCUDA || type == kDLCUDAManaged; }

struct Piece {
  int64_t low, high;  // bytes from the tensor's address: what the dimensions of a smaller stride reach
};
// Whether `t` is that piece, repeated at multiples of `period` bytes.
bool repeats(const Tensor& t, int64_t period, Piece* piece) noexcept {
  *piece = {0, t.itemsize};
  for (int i = 0; i < t.rank; ++i) {
    const int64_t bytes = t.stride[i] * t.itemsize;  // no overflow: read() found that extent times stride does not
    if (t.shape[i] <= 1) continue;
    if (std::abs(bytes) >= period) {
      if (bytes % period != 0) return false;
    } else {
      (bytes > 0 ? piece->high : piece->low) += (t.shape[i] - 1) * bytes;
    }
  }
  return piece->high - piece->low <= period;
}
// Both repeat every `period` bytes, and their pieces do not meet.
bool apart(const Tensor& a, const Tensor& b, int64_t period) noexcept {
  Piece p, q;
  if (!repeats(a, period, &p) || !repeats(b, period, &q)) return false;
  // Distance of b's piece behind a's, within one period.
  const uintptr_t at_a = reinterpret_cast<uintptr_t>(a.data) + p.low, at_b = reinterpret_cast<uintptr_t>(b.data) + q.low;
  const int64_t distance = at_b >= at_a ? static_cast<int64_t>((at_b - at_a) % period)
                                        : (period - static_cast<int64_t>((at_a - at_b) % period)) % period;
  return distance >= p.high - p.low && distance + (q.high - q.low) <= period;
}

}  // namespace

const char* element_name(Element e) noexcept {
  static constexpr const char* kNames[] = {"float32", "bf16", "fp16", "absent", "int32", "int64"};
  return kNames[static_cast<int>(e)];
}

Text shape_text(int32_t rank, const int64_t* shape) noexcept {
  Text text;
  size_t used = std::snprintf(text.s, sizeof text.s, "[");
  for (int i = 0; i < rank && i < kMaxRank; ++i) {
    used += std::snprintf(text.s + used, sizeof text.s - used, "%s%lld", i ? "," : "", static_cast<long long>(shape[i]));
  }
  std::snprintf(text.s + used, sizeof text.s - used, rank > kMaxRank ? ",...]" : "]");
  return text;
}

cula_status Operands::missing(const char* name) noexcept {
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is missing (NULL)", op_, name);
}

cula_status Operands::other_device(const char* name, const DLDevice& device) noexcept {
  const int32_t type = device.device_type, id = type == kDLCPU ? 0 : device.device_id;
  if (first_ == nullptr) {
    if (type != kDLCPU && !is_gpu(type)) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is on %s; tensors must be on the CPU or on a CUDA device (kDLCPU, kDLCUDA, kDLCUDAManaged)",
                  op_, name, device_text(type, id).s);
    }
    if (id < 0) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has device_id %d", op_, name, id);
    first_ = name;
    device_type_ = is_gpu(type) ? static_cast<int32_t>(kDLCUDA) : type;
    device_id_ = id;
    return CULA_OK;
  }
  if (id == device_id_ && (type == device_type_ || (is_gpu(type) && device_type_ == kDLCUDA))) return CULA_OK;  // managed, or CPU of a number
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is on %s, %s is on %s; all tensors of a call must be on one device", op_, name,
              device_text(type, id).s, first_, device_text(device_type_, device_id_).s);
}

cula_status Operands::read(const char* name, const DLTensor* given, uint32_t dtypes, Tensor* out) noexcept {
  const DLTensor& t = *given;
  if (first_ == nullptr || t.device.device_type != device_type_ || t.device.device_id != device_id_) CULA_TRY(other_device(name, t.device));
  const int32_t rank = t.ndim;
  if (__builtin_expect(rank < 0 || rank > kMaxRank || (rank > 0 && t.shape == nullptr), 0)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has ndim %d%s; from 0 to %d, with a shape", op_, name, rank,
                t.shape == nullptr ? " and shape NULL" : "", kMaxRank);
  }
  const Element dtype = element_of(t.dtype);
  if (__builtin_expect(!(dtypes >> static_cast<int>(dtype) & 1), 0)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has dtype %s; must be %s", op_, name, dtype_text(t.dtype).s, set_text(dtypes).s);
  }
  const int64_t itemsize = kItemsize[static_cast<int>(dtype)];
  out->name = name;
  out->dtype = dtype;
  out->itemsize = static_cast<uint8_t>(itemsize);
  out->rank = rank;

  // Elements, and the lowest and highest offset of one.
  int64_t elements = 1, low = 0, high = 0;
  bool empty = false, overflow = false;
  for (int i = rank - 1; i >= 0; --i) {
    const int64_t extent = t.shape[i];
    int64_t stride = 0;
    if (extent > 1) {
      stride = t.strides != nullptr ? t.strides[i] : elements;
      int64_t reach;
      if (__builtin_mul_overflow(extent - 1, stride, &reach) || __builtin_mul_overflow(elements, extent, &elements)) {
        overflow = true;
      } else if (stride >= 0 ? __builtin_add_overflow(high, reach, &high) : __builtin_add_overflow(low, reach, &low)) {
        overflow = true;
      }
    } else if (extent == 0) {
      empty = true;
    } else if (extent < 0) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; extents must not be negative", op_, name, shape_text(rank, t.shape).s);
    }
    out->shape[i] = extent;
    out->stride[i] = stride;
  }
  if (__builtin_expect(empty, 0)) {  // not `elements == 0`: a product that overflowed may be 0 too
    out->elements = 0;
    out->data = nullptr;
    out->begin = out->end = 0;
    return CULA_OK;
  }
  if (__builtin_expect(t.data == nullptr, 0)) {
    return fail(CULA_ERR_INVALID_ARGUMENT,
                "%s: %s has shape %s and data NULL; a tensor without storage (torch's FakeTensor or meta tensors) cannot be computed with", op_,
                name, shape_text(rank, t.shape).s);
  }

  const uintptr_t data = reinterpret_cast<uintptr_t>(t.data);
  uintptr_t base, begin, end;
  int64_t length;
  if (__builtin_expect(overflow || __builtin_add_overflow(high, 1, &high) || __builtin_mul_overflow(high, itemsize, &high) ||
                           __builtin_mul_overflow(low, itemsize, &low) || __builtin_sub_overflow(high, low, &length) ||
                           __builtin_add_overflow(data, t.byte_offset, &base) || __builtin_add_overflow(base, low, &begin) ||
                           __builtin_add_overflow(base, high, &end),
                       0)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; with its strides and byte_offset it does not fit in the address space", op_, name,
                shape_text(rank, t.shape).s);
  }
  if (__builtin_expect((base & (itemsize - 1)) != 0, 0)) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is at %#llx; its address must be a multiple of %d bytes, the size of %s", op_, name,
                static_cast<unsigned long long>(base), static_cast<int>(itemsize), element_name(dtype));
  }
  out->elements = elements;
  out->begin = begin;
  out->end = end;
  out->data = reinterpret_cast<const char*>(base);
  return CULA_OK;
}

cula_status rows_with_unit(const char* op, const Tensor& t, int32_t tail, const char* layout, Rows* rows) noexcept {
  if (t.rank != tail + 2) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; expected %s", op, t.name, shape_text(t).s, layout);
  }
  if (t.shape[0] != 1 && t.shape[1] != 1) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; expected %s, with the rows as [N,1,...] or [1,N,...]: one token a row", op, t.name,
                shape_text(t).s, layout);
  }
  const int at = t.shape[1] == 1 ? 0 : 1;
  *rows = {t.shape[at], t.stride[at], t.shape + 2, t.stride + 2};
  return CULA_OK;
}

cula_status strided(const char* op, const Tensor& t) noexcept {
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: the last stride of %s is %lld; must be 1", op, t.name, static_cast<long long>(t.stride[t.rank - 1]));
}

cula_status require_vector(const char* op, const Tensor& t, int64_t count, const char* meaning) noexcept {
  if (t.elements != count) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s; expected %s = %lld elements", op, t.name, shape_text(t).s, meaning,
                static_cast<long long>(count));
  }
  int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.shape[i] <= 1) continue;
    if (t.stride[i] != stride) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has stride %lld in dimension %d; it must be compact, stride %lld there", op, t.name,
                  static_cast<long long>(t.stride[i]), i, static_cast<long long>(stride));
    }
    stride *= t.shape[i];
  }
  return CULA_OK;
}

cula_status require_distinct(const char* op, const Tensor& t) noexcept {
  // Strides that fall from the first to the last dimension, as nearly always.
  int64_t span = 0;  // largest distance, in elements, within the dimensions so far
  int i = t.elements > 1 ? t.rank - 1 : -1;
  for (; i >= 0; --i) {
    if (t.shape[i] <= 1) continue;
    const int64_t stride = std::abs(t.stride[i]);
    if (stride <= span) break;
    span += (t.shape[i] - 1) * stride;
  }
  if (i < 0) return CULA_OK;

  int order[kMaxRank], count = 0;  // dimensions by stride
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] <= 1) continue;
    int at = count++;
    for (; at > 0 && std::abs(t.stride[order[at - 1]]) > std::abs(t.stride[d]); --at) order[at] = order[at - 1];
    order[at] = d;
  }
  span = 0;
  for (int k = 0; k < count; ++k) {
    const int64_t stride = std::abs(t.stride[order[k]]);
    if (stride <= span) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s has shape %s and stride %lld in dimension %d: two of its elements share memory, but it is written", op,
                  t.name, shape_text(t).s, static_cast<long long>(t.stride[order[k]]), order[k]);
    }
    span += (t.shape[order[k]] - 1) * stride;
  }
  return CULA_OK;
}

bool interleaved_overlap(const Tensor& a, const Tensor& b) noexcept {
  for (int i = 0; i < a.rank; ++i) {
    if (a.shape[i] > 1 && a.stride[i] != 0 && apart(a, b, std::abs(a.stride[i] * a.itemsize))) return false;
  }
  return true;
}

cula_status overlap(const char* op, const Tensor& written, const Tensor& other) noexcept {
  return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s overlaps %s in memory", op, written.name, other.name);
}

bool aligned16(const Tensor& t) noexcept {
  uint64_t bits = reinterpret_cast<uintptr_t>(t.data);
  for (int i = 0; i < t.rank - 1; ++i) bits |= static_cast<uint64_t>(t.stride[i]) * t.itemsize;
  return bits % 16 == 0;
}

cula_status resolve_target(const Request& request, const Operands& operands, Target* target) noexcept {
  if (operands.device_type() == kDLCPU) {
    if (request.arch != CULA_ARCH_DEVICE && request.arch != CULA_ARCH_CPU) {
      return fail(CULA_ERR_INVALID_ARGUMENT, "%s: arch %s is asked for, but the tensors are on the CPU", request.name, arch_name(request.arch));
    }
    target->arch = CULA_ARCH_CPU;
    target->sm_count = 1;
    return CULA_OK;
  }
  if (request.arch == CULA_ARCH_CPU) {
    return fail(CULA_ERR_INVALID_ARGUMENT, "%s: arch cpu is asked for, but the tensors are on %s", request.name,
                device_text(operands.device_type(), operands.device_id()).s);
  }
  if (request.arch == CULA_ARCH_DEVICE) {
    CULA_TRY(driver::device_target(request.name, operands.device_id(), target));
  } else {
    target->arch = request.arch;
    // Of the usual part, as aot/archs.py has it.
    switch (request.arch) {
      case CULA_ARCH_SM90: target->sm_count = 132; break;
      case CULA_ARCH_SM120: target->sm_count = 188; break;
      default: target->sm_count = 148; break;
    }
  }
  if (request.sm_count > 0) target->sm_count = request.sm_count;
  return CULA_OK;
}

}  // namespace cula
