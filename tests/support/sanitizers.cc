// What LeakSanitizer is to overlook: libhdf5 1.10 loses some memory when it meets damaged metadata.
extern "C" const char* __lsan_default_suppressions();                            // NOLINT(bugprone-reserved-identifier)
extern "C" const char* __lsan_default_suppressions() { return "leak:libhdf5"; }  // NOLINT(bugprone-reserved-identifier)
