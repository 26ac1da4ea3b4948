// Default options of the sanitizers, linked into the tests and, in builds with sanitizers, into the program.
//
// AddressSanitizer's quarantine of freed memory is 256 MB by default, which would count against --memory. It keeps the
// stack of each allocation: ten frames say enough in a report, and take less time than thirty.
// LeakSanitizer ignores leaks of libraries: libhdf5 1.10 leaks on damaged metadata, MPI in general.
// ThreadSanitizer ignores two locks that Open MPI's TCP takes in either order, in one thread, when it starts.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=16:malloc_context_size=10"; }
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() {
  return "leak:libhdf5\nleak:^H5\nleak:libmpi\nleak:libopen-rte\nleak:libopen-pal\nleak:libpmix\nleak:mca_\n";
}
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() { return "deadlock:mca_btl_tcp\n"; }
// NOLINTEND(bugprone-reserved-identifier)
