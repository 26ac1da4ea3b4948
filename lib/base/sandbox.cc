// SPDX-License-Identifier: Apache-2.0
#include "lib/base/sandbox.h"

#ifdef __linux__
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "lib/base/syscalls.h"

#if defined(__SANITIZE_ADDRESS__)
#define RESHARD_LEAKS_ARE_LOOKED_FOR 1
#elif defined(__has_feature)
#define RESHARD_LEAKS_ARE_LOOKED_FOR __has_feature(address_sanitizer)
#else
#define RESHARD_LEAKS_ARE_LOOKED_FOR 0
#endif

namespace reshard {
namespace {

bool gave_up_files = false;  // set before other threads exist

// From <linux/landlock.h>, which is missing or older on some systems.
constexpr long kCreateRuleset = 444, kAddRule = 445, kRestrictSelf = 446;
constexpr unsigned kVersion = 1;  // flag of create_ruleset: returns the ABI version
constexpr int kPathBeneath = 1;   // rule type of add_rule
struct Ruleset {
  std::uint64_t files = 0, network = 0, scoped = 0;
};
struct [[gnu::packed]] PathBeneath {
  std::uint64_t rights = 0;
  std::int32_t directory = -1;
};
constexpr std::uint64_t kExecute = 1 << 0, kWriteFile = 1 << 1, kReadFile = 1 << 2, kReadDirectory = 1 << 3;
constexpr std::uint64_t kTruncate = 1 << 14;
constexpr std::uint64_t kOfFiles = kExecute | kWriteFile | kReadFile | kTruncate;

// Returns all rights that this Landlock version can restrict, 0 if Landlock is unavailable.
std::uint64_t all_rights(long version) {
  if (version < 1) return 0;
  if (version == 1) return (1 << 13) - 1;
  return version == 2 ? (1 << 14) - 1 : (1 << 15) - 1;  // moving between directories, truncating
}

// Adds a rule without a stat of the path, which would hang on an unreachable file server. Returns false if no more
// files can be opened.
bool allow(int ruleset, const std::string& path, std::uint64_t rights) {
  const int fd = retry([&] { return sys().open(path.c_str(), O_PATH | O_CLOEXEC, 0); });
  if (fd < 0) return errno != EMFILE && errno != ENFILE;
  PathBeneath rule{rights, fd};
  if (::syscall(kAddRule, ruleset, kPathBeneath, &rule, 0) != 0 && errno == EINVAL) {
    rule.rights &= kOfFiles;  // not a directory
    if (rule.rights != 0) (void)::syscall(kAddRule, ruleset, kPathBeneath, &rule, 0);
  }
  sys().close(fd);
  return true;
}

Error too_few_files() { return io_error("too few files may be open at a time; raise the limit (ulimit -n)"); }

Result<bool> give_up_files(const Sandbox& sandbox) {
  const long version = landlock_version();
  const std::uint64_t all = all_rights(version);
  if (all == 0) return false;
  Ruleset taken{all, version >= 4 ? (sandbox.network ? 1u : 3u) : 0u,  // TCP: listening, connecting
                version >= 6 ? 3u : 0u};                               // abstract sockets, signals to others
  const std::size_t size = version >= 6 ? 24 : version >= 4 ? 16 : 8;
  const auto ruleset = static_cast<int>(::syscall(kCreateRuleset, &taken, size, 0));
  if (ruleset < 0 && (errno == EMFILE || errno == ENFILE)) return too_few_files();
  if (ruleset < 0) return false;
  bool is_complete = true;
  for (const std::string& path : sandbox.listed) is_complete = allow(ruleset, path, kReadDirectory) && is_complete;
  for (const std::string& path : sandbox.read)
    is_complete = allow(ruleset, path, kReadDirectory | kReadFile) && is_complete;
  for (const std::string& path : sandbox.written) is_complete = allow(ruleset, path, all & ~kExecute) && is_complete;
  const bool holds = is_complete && ::syscall(kRestrictSelf, ruleset, 0) == 0;
  sys().close(ruleset);
  if (!is_complete) return too_few_files();
  return holds;
}

#if defined(__x86_64__)
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#else
constexpr std::uint32_t kArchitecture = 0;
#endif
constexpr std::uint32_t kOtherNumbers = 0x40000000;  // x32 system calls on x86-64

// The system calls that commands need: files, memory, threads, waiting, and what the C library uses for them. Calls
// that older headers lack are given by number.
constexpr std::uint32_t kAllowed[] = {
    // files, if open already or permitted by Landlock
    __NR_read, __NR_readv, __NR_pread64, __NR_preadv, __NR_preadv2, __NR_write, __NR_writev, __NR_pwrite64,
    __NR_pwritev, __NR_pwritev2, __NR_openat, 437 /* openat2 */, __NR_close, 436 /* close_range */, __NR_lseek,
    __NR_fstat, __NR_newfstatat, __NR_statx, __NR_faccessat, 439 /* faccessat2 */, __NR_readlinkat, __NR_getdents64,
    __NR_getcwd, __NR_statfs, __NR_fstatfs, __NR_fsync, __NR_fdatasync, __NR_sync_file_range, __NR_fallocate,
    __NR_truncate, __NR_ftruncate, __NR_fadvise64, __NR_copy_file_range, __NR_linkat, __NR_unlinkat, __NR_renameat,
    __NR_renameat2, __NR_mkdirat, __NR_flock, __NR_fcntl, __NR_dup, __NR_dup3, __NR_pipe2, __NR_ppoll, __NR_pselect6,
    __NR_eventfd2, __NR_memfd_create, __NR_umask,
#ifdef __NR_open  // older calls that newer architectures lack
    __NR_open, __NR_stat, __NR_lstat, __NR_access, __NR_readlink, __NR_getdents, __NR_link, __NR_unlink, __NR_rename,
    __NR_mkdir, __NR_rmdir, __NR_dup2, __NR_pipe, __NR_poll, __NR_select, __NR_alarm, __NR_pause, __NR_time,
    __NR_getpgrp, __NR_arch_prctl, __NR_fork,
#endif
    // memory
    __NR_mmap, __NR_munmap, __NR_mremap, __NR_mprotect, __NR_madvise, __NR_msync, __NR_brk, __NR_mincore, __NR_mlock,
    __NR_munlock, __NR_membarrier, 462 /* mseal */,
    // threads, and the child process that examines an HDF5 file first
    __NR_futex, 449 /* futex_waitv */, __NR_set_robust_list, __NR_get_robust_list, __NR_rseq, __NR_sched_yield,
    __NR_sched_getaffinity, __NR_getcpu, __NR_gettid, __NR_set_tid_address, __NR_exit, __NR_exit_group, __NR_wait4,
    __NR_waitid, __NR_prctl,
    // signals and time
    __NR_rt_sigaction, __NR_rt_sigprocmask, __NR_rt_sigreturn, __NR_rt_sigpending, __NR_rt_sigsuspend,
    __NR_rt_sigtimedwait, __NR_sigaltstack, __NR_kill, __NR_tkill, __NR_tgkill, __NR_restart_syscall,
    __NR_clock_gettime, __NR_clock_getres, __NR_clock_nanosleep, __NR_nanosleep, __NR_gettimeofday, __NR_times,
    __NR_setitimer, __NR_getitimer,
    // information about the process and the machine
    __NR_getpid, __NR_getppid, __NR_getpgid, __NR_getsid, __NR_getuid, __NR_geteuid, __NR_getgid, __NR_getegid,
    __NR_getgroups, __NR_getrlimit, __NR_setrlimit, __NR_getrusage, __NR_sysinfo, __NR_uname, __NR_getrandom,
#if RESHARD_LEAKS_ARE_LOOKED_FOR
    __NR_ptrace,  // LeakSanitizer stops the threads of its own process
#endif
};

// System calls that a network client needs in addition.
constexpr std::uint32_t kNetwork[] = {
    __NR_socket,     __NR_socketpair, __NR_connect,   __NR_sendto,      __NR_sendmsg,       __NR_sendmmsg,
    __NR_recvfrom,   __NR_recvmsg,    __NR_bind,      __NR_getsockname, __NR_getpeername,   __NR_setsockopt,
    __NR_getsockopt, __NR_shutdown,   __NR_epoll_ctl, __NR_epoll_pwait, __NR_epoll_create1,
#ifdef __NR_epoll_wait
    __NR_epoll_wait,
#endif
};

// The last call that kAllowed was chosen from. Later ones fail with ENOSYS, so that a newer C library falls back on an
// older call; all others that are not allowed fail with EPERM.
constexpr std::uint32_t kLastKnown = 467;
constexpr std::uint32_t kClone3 = 435;

// The ioctl requests that query a terminal.
constexpr std::uint32_t kTerminalRequests[] = {0x5401 /* TCGETS */, 0x5413 /* TIOCGWINSZ */, 0x802c542a /* TCGETS2 */};

// clone's flags for namespaces (user, mount, network, process, IPC, UTS, cgroup).
constexpr std::uint32_t kNamespaces = 0x7e020000;

constexpr sock_filter load(std::size_t offset) {
  return {BPF_LD | BPF_W | BPF_ABS, 0, 0, static_cast<std::uint32_t>(offset)};
}
constexpr sock_filter answer(std::uint32_t action) { return {BPF_RET | BPF_K, 0, 0, action}; }
constexpr sock_filter kAllow = answer(SECCOMP_RET_ALLOW);
constexpr sock_filter kRefuse = answer(SECCOMP_RET_ERRNO | EPERM);
constexpr sock_filter kUnknown = answer(SECCOMP_RET_ERRNO | ENOSYS);
// Runs the next instruction if the loaded word equals `value` (or is at least `value`), else skips it.
constexpr sock_filter if_equal(std::uint32_t value) { return {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, value}; }
constexpr sock_filter if_at_least(std::uint32_t value) { return {BPF_JMP | BPF_JGE | BPF_K, 0, 1, value}; }

// Both architectures are little-endian, so the low half of an argument comes first.
constexpr std::size_t argument(std::size_t i) { return offsetof(seccomp_data, args) + i * sizeof(std::uint64_t); }

// Builds the filter: the calls of kAllowed, those of kNetwork if it is wanted; ioctl with kTerminalRequests; prlimit64
// of this process; clone without namespaces, and not clone3, whose flags a filter cannot read.
std::vector<sock_filter> call_filter(bool network) {
  std::vector<sock_filter> program = {
      load(offsetof(seccomp_data, arch)),
      {BPF_JMP | BPF_JEQ | BPF_K, 1, 0, kArchitecture},
      kRefuse,
      load(offsetof(seccomp_data, nr)),
      if_at_least(kOtherNumbers),
      kRefuse,
      if_at_least(kLastKnown + 1),
      kUnknown,
      if_equal(kClone3),
      kUnknown,
  };
  const auto allow_call = [&](std::uint32_t call) {
    program.push_back(if_equal(call));
    program.push_back(kAllow);
  };
  for (const std::uint32_t call : kAllowed) allow_call(call);
  if (network)
    for (const std::uint32_t call : kNetwork) allow_call(call);
  // prlimit64 changes the limits of any process of the user: only this one's, which is process 0 to it.
  program.push_back({BPF_JMP | BPF_JEQ | BPF_K, 0, 4, __NR_prlimit64});
  program.push_back(load(argument(0)));
  program.push_back(if_equal(0));
  program.push_back(kAllow);
  program.push_back(kRefuse);
  constexpr auto requests = static_cast<std::uint8_t>(2 * std::size(kTerminalRequests) + 2);
  program.push_back({BPF_JMP | BPF_JEQ | BPF_K, 0, requests, __NR_ioctl});
  program.push_back(load(argument(1)));
  for (const std::uint32_t request : kTerminalRequests) {
    program.push_back(if_equal(request));
    program.push_back(kAllow);
  }
  program.push_back(kRefuse);
  program.push_back({BPF_JMP | BPF_JEQ | BPF_K, 0, 3, __NR_clone});
  program.push_back(load(argument(0)));
  program.push_back({BPF_JMP | BPF_JSET | BPF_K, 1, 0, kNamespaces});
  program.push_back(kAllow);
  program.push_back(kRefuse);
  return program;
}

bool give_up_calls(bool network) {
  if (kArchitecture == 0) return false;
  std::vector<sock_filter> program = call_filter(network);
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0;
}

}  // namespace

long landlock_version() { return std::max(0L, ::syscall(kCreateRuleset, nullptr, 0, kVersion)); }

Result<Sandboxed> enter_sandbox(const Sandbox& sandbox) {
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return Sandboxed();
  gave_up_files = TRY(give_up_files(sandbox));
  return Sandboxed{gave_up_files, give_up_calls(sandbox.network)};
}

bool in_sandbox() { return gave_up_files; }

}  // namespace reshard

#else

namespace reshard {

Result<Sandboxed> enter_sandbox(const Sandbox&) { return Sandboxed(); }
long landlock_version() { return 0; }
bool in_sandbox() { return false; }

}  // namespace reshard

#endif
