// One kernel source (KERNEL_SOURCE, entry KERNEL_ENTRY, CULA_IO_...) for test_kernels.py: launch(grid, parameter pointers).
#include "emulate.h"

#include KERNEL_SOURCE

namespace {

template <class... Args, size_t... I>
void call(void (*kernel)(Args...), void* const* params, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<Args>*>(params[I])...);
}

template <class... Args>
void run(void (*kernel)(Args...), unsigned grid, void* const* params) {
  emulate::launch(grid, 256, [=] { call(kernel, params, std::index_sequence_for<Args...>{}); });
}

template <class... Args>
constexpr int count(void (*)(Args...)) {
  return sizeof...(Args);
}

}  // namespace

extern "C" int param_count() { return count(KERNEL_ENTRY); }
extern "C" void launch(unsigned grid, void* const* params) { run(KERNEL_ENTRY, grid, params); }
