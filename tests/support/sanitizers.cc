// How the sanitizers are to run: linked into the tests and, where they are on, into the program.
//
// AddressSanitizer keeps what was freed for a while, 256 MB by default: that would count against --memory.
// LeakSanitizer is to overlook what libraries lose: libhdf5 1.10 when it meets damaged metadata; MPI for good.
// ThreadSanitizer is to overlook two locks that Open MPI's TCP takes in either order, in one thread, when it starts.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=16"; }
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() {
  return "leak:libhdf5\nleak:libmpi\nleak:libopen-rte\nleak:libopen-pal\nleak:libpmix\nleak:mca_\n";
}
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() { return "deadlock:mca_btl_tcp\n"; }
// NOLINTEND(bugprone-reserved-identifier)
