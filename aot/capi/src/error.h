// How a call fails: one message a thread, and the pair of macros that keeps every exception inside the library.
#pragma once
#include <exception>
#include <new>

#include "cula.h"

namespace cula {

// Stores the message of the calling thread and returns `status`, so that a check is one line: `return fail(...)`.
// Text: function or op, operand by name, what was given, what is allowed. Long messages are cut, never overrun.
[[gnu::cold, gnu::noinline, gnu::format(printf, 2, 3)]] cula_status fail(cula_status status, const char* format, ...) noexcept;

// Copies the message, as cula_last_error promises.
size_t last_error(char* buffer, size_t n) noexcept;

}  // namespace cula

#define CULA_TRY(expression)                                      \
  do {                                                            \
    if (const cula_status try_status = (expression)) return try_status; \
  } while (0)

// The body of every exported function that can fail stands between these two. The last handler is for what is not a
// std::exception: without it such a throw would end the process, because exported functions are noexcept.
#define CULA_API_BEGIN try {
#define CULA_API_END(function)                                                                        \
  }                                                                                                   \
  catch (const std::bad_alloc&) {                                                                     \
    return ::cula::fail(CULA_ERR_OUT_OF_MEMORY, "%s: out of host memory", function);                  \
  }                                                                                                   \
  catch (const std::exception& error) {                                                               \
    return ::cula::fail(CULA_ERR_INTERNAL, "%s: %s", function, error.what());                         \
  }                                                                                                   \
  catch (...) {                                                                                       \
    return ::cula::fail(CULA_ERR_INTERNAL, "%s: an exception of unknown type", function);             \
  }
