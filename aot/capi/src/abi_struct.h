// Versioned structs: how the library reads a struct that a caller of another version wrote.
#pragma once
#include <cstddef>
#include <cstring>

#include "error.h"

namespace cula {

// Larger than any struct of this interface will grow. A struct_size above it is garbage (uninitialised memory), and looking
// at that many bytes for a non-zero one would read past the caller's memory.
constexpr size_t kMaxStructSize = 1 << 16;

// Checks struct_size, the first member of `given`, against a struct of which the library knows `known` bytes and whose first
// version had `first` bytes: CULA_ERR_VERSION if it is below `first` or has unknown non-zero bytes.
inline cula_status check_struct(const char* function, const char* name, const void* given, size_t first, size_t known) noexcept {
  if (given == nullptr) return fail(CULA_ERR_INVALID_ARGUMENT, "%s: %s is NULL", function, name);
  size_t size;
  std::memcpy(&size, given, sizeof size);
  if (__builtin_expect(size == known, 1)) return CULA_OK;
  if (size < first || size > kMaxStructSize) {
    return fail(CULA_ERR_VERSION, "%s: struct_size of %s is %zu; expected %zu (set struct_size = CULA_SIZEOF(%s))", function, name,
                size, known, name);
  }
  const unsigned char* bytes = static_cast<const unsigned char*>(given);
  for (size_t i = known; i < size; ++i) {
    if (bytes[i] != 0) {
      return fail(CULA_ERR_VERSION,
                  "%s: %s has %zu bytes, this library knows %zu, and byte %zu is not zero: a field of a newer version is set", function,
                  name, size, known, i);
    }
  }
  return CULA_OK;
}

// Writes an output struct, struct_size apart, as far as the caller's version has it.
template <class T>
void write_struct(const T& value, size_t known, void* given) noexcept {
  size_t size;
  std::memcpy(&size, given, sizeof size);
  const size_t end = size < known ? size : known;
  std::memcpy(static_cast<char*>(given) + sizeof size, reinterpret_cast<const char*>(&value) + sizeof size, end - sizeof size);
}

}  // namespace cula
