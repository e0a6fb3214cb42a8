// Keeps the C++ runtime that is linked into libcula.so from asking for a newer glibc than 2.28.
//
// libstdc++.a and libgcc_eh.a of a distribution are compiled against its own glibc and import what that offers. The hidden
// definitions below take the place of those imports, for references from the archives as well as from our own objects; what
// nothing refers to is dropped by --gc-sections. aot/common/cpu/glibc_compat.h does the same for our own calls of pthread and dl
// functions, and is not included here. `build_kernels.py verify` names every symbol that would need an entry.
#include <link.h>
#include <pthread.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>

// GLIBC_2.34 moved these from libpthread into libc under a new version; the first version is still there, on every glibc.
extern "C" {
int cula_base_once(pthread_once_t*, void (*)());
int cula_base_key_create(pthread_key_t*, void (*)(void*));
}
__asm__(".symver cula_base_once,pthread_once@GLIBC_2.2.5");
__asm__(".symver cula_base_key_create,__pthread_key_create@GLIBC_2.2.5");

// In C++ on glibc 2.38 a call of strtol is a call of __isoc23_strtol (which also reads 0b101). By label, so that these are not.
extern "C" {
long cula_base_strtol(const char*, char**, int) __asm__("strtol");
unsigned long cula_base_strtoul(const char*, char**, int) __asm__("strtoul");
long long cula_base_strtoll(const char*, char**, int) __asm__("strtoll");
unsigned long long cula_base_strtoull(const char*, char**, int) __asm__("strtoull");
int cula_base_vsscanf(const char*, const char*, va_list) __asm__("__isoc99_vsscanf");
}

namespace {

// struct dl_find_object of glibc 2.35 on x86-64.
struct FoundObject {
  unsigned long long flags;
  void* map_start;
  void* map_end;
  struct link_map* link_map;
  void* eh_frame;
  unsigned long long reserved[7];
};

struct Search {
  uintptr_t pc;
  FoundObject* result;
};

int contains(dl_phdr_info* info, size_t, void* data) {
  const Search* search = static_cast<Search*>(data);
  uintptr_t low = UINTPTR_MAX, high = 0, frame = 0;
  bool found = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info->dlpi_phdr[i];
    const uintptr_t start = info->dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD) {
      low = start < low ? start : low;
      high = start + segment.p_memsz > high ? start + segment.p_memsz : high;
      found = found || (search->pc >= start && search->pc < start + segment.p_memsz);
    } else if (segment.p_type == PT_GNU_EH_FRAME) {
      frame = start;
    }
  }
  if (!found || frame == 0) return 0;
  *search->result = {0, reinterpret_cast<void*>(low), reinterpret_cast<void*>(high), nullptr, reinterpret_cast<void*>(frame), {}};
  return 1;
}

}  // namespace

// By label: the headers of some glibc declare these too, with their own types and exception specifications.
#define CULA_STANDS_FOR(symbol) __asm__(symbol)
extern "C" {

extern char cula_single_threaded CULA_STANDS_FOR("__libc_single_threaded");
int cula_once(pthread_once_t*, void (*)()) CULA_STANDS_FOR("pthread_once");
int cula_key_create(pthread_key_t*, void (*)(void*)) CULA_STANDS_FOR("__pthread_key_create");
int cula_find_object(void*, FoundObject*) CULA_STANDS_FOR("_dl_find_object");
long cula_strtol(const char*, char**, int) CULA_STANDS_FOR("__isoc23_strtol");
unsigned long cula_strtoul(const char*, char**, int) CULA_STANDS_FOR("__isoc23_strtoul");
long long cula_strtoll(const char*, char**, int) CULA_STANDS_FOR("__isoc23_strtoll");
unsigned long long cula_strtoull(const char*, char**, int) CULA_STANDS_FOR("__isoc23_strtoull");
int cula_vsscanf(const char*, const char*, va_list) CULA_STANDS_FOR("__isoc23_vsscanf");
int cula_sscanf(const char*, const char*, ...) CULA_STANDS_FOR("__isoc23_sscanf");

// GLIBC_2.32. False: the reference counts of libstdc++ stay atomic, which is always right.
char cula_single_threaded = 0;

int cula_once(pthread_once_t* once, void (*function)()) { return cula_base_once(once, function); }

int cula_key_create(pthread_key_t* key, void (*destructor)(void*)) { return cula_base_key_create(key, destructor); }

// GLIBC_2.35. How libgcc's unwinder finds the frames of a code address; it only reads eh_frame. Slower than glibc's own by a walk
// over the loaded objects, and only when an exception is thrown.
int cula_find_object(void* pc, FoundObject* result) {
  Search search{reinterpret_cast<uintptr_t>(pc), result};
  return dl_iterate_phdr(contains, &search) == 1 ? 0 : -1;
}

// GLIBC_2.38.
long cula_strtol(const char* text, char** end, int base) { return cula_base_strtol(text, end, base); }
unsigned long cula_strtoul(const char* text, char** end, int base) { return cula_base_strtoul(text, end, base); }
long long cula_strtoll(const char* text, char** end, int base) { return cula_base_strtoll(text, end, base); }
unsigned long long cula_strtoull(const char* text, char** end, int base) { return cula_base_strtoull(text, end, base); }
int cula_vsscanf(const char* text, const char* format, va_list arguments) { return cula_base_vsscanf(text, format, arguments); }
int cula_sscanf(const char* text, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int count = cula_base_vsscanf(text, format, arguments);
  va_end(arguments);
  return count;
}

}  // extern "C"
