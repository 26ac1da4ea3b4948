// Preloaded into a process: RESHARD_THREADS="N" lets it start N threads and no more, like a limit on processes.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*), void* data) {
  static const char* const text = std::getenv("RESHARD_THREADS");
  static std::atomic<long> left{text == nullptr ? 0 : std::atol(text)};
  if (left-- <= 0) return EAGAIN;
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(::dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, start, data);
}
