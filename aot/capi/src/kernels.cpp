#include "kernels.h"

#include <algorithm>
#include <cstdio>

#include "error.h"
#include "names.h"

namespace cula {
namespace {

// The order of the table, as two words.
struct Rank {
  uint64_t high, low;
  bool operator<(const Rank& other) const noexcept { return high != other.high ? high < other.high : low < other.low; }
  bool operator==(const Rank& other) const noexcept { return high == other.high && low == other.low; }
};
Rank rank(const KernelKey& k) noexcept {
  return {static_cast<uint64_t>(static_cast<uint32_t>(k.arch)) << 32 | static_cast<uint32_t>(k.op),
          static_cast<uint64_t>(k.io) << 56 | static_cast<uint64_t>(k.state) << 48 | static_cast<uint64_t>(k.layout) << 40 |
              static_cast<uint64_t>(k.variant) << 32 | static_cast<uint64_t>(k.k) << 16 | k.v};
}

// Axes in the order in which a missing value is reported: what a reader would name first.
enum Axis { kArch, kIo, kState, kLayout, kVariant, kDimK, kDimV, kAxes };

int32_t value(const KernelKey& k, int axis) noexcept {
  const int32_t values[kAxes] = {k.arch, k.io, k.state, k.layout, static_cast<int32_t>(k.variant), k.k, k.v};
  return values[axis];
}

void append(char* text, size_t size, const char* format, const char* word, int32_t number) noexcept {
  const size_t used = std::strlen(text);
  if (word != nullptr) {
    std::snprintf(text + used, size - used, format, word);
  } else {
    std::snprintf(text + used, size - used, format, number);
  }
}

const char* axis_word(int axis, int32_t value) noexcept {
  switch (axis) {
    case kArch: return arch_name(value);
    case kIo:
    case kState: return dtype_name(static_cast<DType>(value));
    case kLayout: return layout_name(value);
    case kVariant: return variant_name(static_cast<Variant>(value));
    default: return nullptr;
  }
}

// "64, 128, 256": values of `axis` among the kernels of the op that agree with `key` on all earlier axes.
int list_built(const KernelKey& key, int axis, char* text, size_t size) noexcept {
  text[0] = 0;
  int32_t seen[64];
  int count = 0;
  for (int32_t i = 0; i < kKernelCount && count < 64; ++i) {
    const KernelKey& other = kKernels[i].key;
    bool same = other.op == key.op;
    for (int earlier = 0; earlier < axis; ++earlier) same = same && value(other, earlier) == value(key, earlier);
    const int32_t v = value(other, axis);
    if (same && std::find(seen, seen + count, v) == seen + count) seen[count++] = v;
  }
  std::sort(seen, seen + count);
  for (int i = 0; i < count; ++i) {
    const char* word = axis_word(axis, seen[i]);
    append(text, size, word != nullptr ? (i ? ", %s" : "%s") : (i ? ", %d" : "%d"), word, seen[i]);
  }
  return count;
}

[[gnu::cold, gnu::noinline]] cula_status not_built(const char* op_name, const KernelKey& key) noexcept {
  static constexpr const char* kNames[kAxes] = {"arch", "dtype", "state dtype", "state layout", "variant", "head_dim_k", "head_dim_v"};
  char built[256];
  for (int axis = 0; axis < kAxes; ++axis) {
    const int count = list_built(key, axis, built, sizeof built);
    if (axis == kArch && count == 0) {
      return fail(CULA_ERR_UNSUPPORTED, "%s: this library has no kernels of this op", op_name);
    }
    bool found = false;  // does any kernel have the wanted value here?
    for (int32_t i = 0; i < kKernelCount && !found; ++i) {
      const KernelKey& other = kKernels[i].key;
      found = other.op == key.op;
      for (int a = 0; a <= axis; ++a) found = found && value(other, a) == value(key, a);
    }
    if (found) continue;
    const int32_t wanted = value(key, axis);
    if (axis == kArch) {
      return fail(CULA_ERR_UNSUPPORTED, "%s: no %s kernels in this library; built archs: %s", op_name, arch_name(wanted), built);
    }
    char shown[32] = "";
    const char* word = axis_word(axis, wanted);
    append(shown, sizeof shown, word != nullptr ? "%s" : "%d", word, wanted);
    return fail(CULA_ERR_UNSUPPORTED, "%s: %s %s is not built for %s%s%s; built: %s", op_name, kNames[axis], shown,
                arch_name(key.arch), axis > kIo ? " " : "", axis > kIo ? dtype_name(static_cast<DType>(key.io)) : "", built);
  }
  return fail(CULA_ERR_INTERNAL, "%s: the kernel table is not sorted", op_name);
}

}  // namespace

int32_t find_kernel(const KernelKey& key) noexcept {
  const Rank wanted = rank(key);
  const KernelRow* end = kKernels + kKernelCount;
  const KernelRow* row = std::lower_bound(kKernels, end, wanted, [](const KernelRow& a, const Rank& b) { return rank(a.key) < b; });
  return row != end && rank(row->key) == wanted ? static_cast<int32_t>(row - kKernels) : -1;
}

cula_status select_kernel(const char* op_name, const KernelKey& key, int32_t param_count, int32_t* kernel) noexcept {
  const int32_t found = find_kernel(key);
  if (found < 0) return not_built(op_name, key);
  const KernelRow& row = kKernels[found];
  // A launch with the wrong number of parameters would let the driver read past the array of their addresses.
  if (row.param_count != param_count) {
    return fail(CULA_ERR_ARTIFACT, "%s: kernel %s takes %d parameters, the plan has %d", op_name, row.id, row.param_count, param_count);
  }
  *kernel = found;
  return CULA_OK;
}

}  // namespace cula
