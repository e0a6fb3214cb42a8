// Keeps libcula.so loadable on glibc 2.28 when it is built on a newer one.
//
// glibc 2.34 merged libpthread and libdl into libc and gave the functions below a second, equal version GLIBC_2.32 or 2.34, which
// the linker prefers. This header binds them to the version that every glibc of the last twenty years has.
//
// Use: g++ -include aot/common/cpu/glibc_compat.h for every source of the library, and, because on 2.28 these functions still live in
// libpthread.so.0 and libdl.so.2, name both as needed libraries:
//   -Wl,--push-state,--no-as-needed -l:libpthread.so.0 -l:libdl.so.2 -Wl,--pop-state
// It cannot reach into libstdc++.a: std::thread, std::call_once and thread_local destructors there would bring the new versions
// back, so the CPU arch uses pthreads itself. Check with: objdump -T libcula.so | grep -o 'GLIBC_[0-9.]*' | sort -Vu
//
// Not in here: exp, log, pow (GLIBC_2.29), whose older version differs in errno and is slower. Use the float32 functions (2.27).
#pragma once

#if defined(__linux__) && defined(__has_include)
#if __has_include(<features.h>)
#include <features.h>
#endif
#endif

#if defined(__GLIBC__)
#if defined(__x86_64__)
#define CULA_GLIBC_BASE "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define CULA_GLIBC_BASE "GLIBC_2.17"
#endif
#endif

#if defined(CULA_GLIBC_BASE) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define CULA_PIN(name) __asm__(".symver " #name "," #name "@" CULA_GLIBC_BASE)
CULA_PIN(pthread_create);
CULA_PIN(pthread_join);
CULA_PIN(pthread_detach);
CULA_PIN(pthread_sigmask);
CULA_PIN(pthread_once);
CULA_PIN(pthread_key_create);
CULA_PIN(pthread_key_delete);
CULA_PIN(pthread_getspecific);
CULA_PIN(pthread_setspecific);
CULA_PIN(pthread_mutex_trylock);
CULA_PIN(dlopen);
CULA_PIN(dlclose);
CULA_PIN(dlsym);
CULA_PIN(dlerror);
CULA_PIN(dladdr);
#undef CULA_PIN
#endif
