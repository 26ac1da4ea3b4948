#include "lib/base/sandbox.h"

#ifdef __linux__
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define RESHARD_LEAKS_ARE_LOOKED_FOR 1
#elif defined(__has_feature)
#define RESHARD_LEAKS_ARE_LOOKED_FOR __has_feature(address_sanitizer)
#else
#define RESHARD_LEAKS_ARE_LOOKED_FOR 0
#endif

namespace reshard {
namespace {

bool gave_up_files = false;  // set before there are other threads

// <linux/landlock.h>, which not every system has, or not this new.
constexpr long kCreateRuleset = 444, kAddRule = 445, kRestrictSelf = 446;
constexpr unsigned kVersion = 1;  // create_ruleset's flag: tells the interface's version
constexpr int kPathBeneath = 1;   // add_rule's kind of rule
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

// Everything that this version of the interface can take away; 0: there is none.
std::uint64_t all_rights(long version) {
  if (version < 1) return 0;
  if (version == 1) return (1 << 13) - 1;
  return version == 2 ? (1 << 14) - 1 : (1 << 15) - 1;  // moving between directories, truncating
}

// Asks nothing of what is there, as a file server that is away would not answer. False where no more files can be open.
bool allow(int ruleset, const std::string& path, std::uint64_t rights) {
  const int fd = ::open(path.c_str(), O_PATH | O_CLOEXEC);
  if (fd < 0) return errno != EMFILE && errno != ENFILE;
  PathBeneath rule{rights, fd};
  if (::syscall(kAddRule, ruleset, kPathBeneath, &rule, 0) != 0 && errno == EINVAL) {
    rule.rights &= kOfFiles;  // it is no directory
    if (rule.rights != 0) (void)::syscall(kAddRule, ruleset, kPathBeneath, &rule, 0);
  }
  ::close(fd);
  return true;
}

Error too_few_files() { return io_error("too few files may be open at a time (ulimit -n): raise that limit"); }

Result<bool> give_up_files(const Sandbox& sandbox) {
  const long version = ::syscall(kCreateRuleset, nullptr, 0, kVersion);
  const std::uint64_t all = all_rights(version);
  if (all == 0) return false;
  Ruleset taken{all, version >= 4 ? 3u : 0u, version >= 6 ? 3u : 0u};  // TCP; abstract sockets, signals to others
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
  ::close(ruleset);
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
constexpr std::uint32_t kOtherNumbers = 0x40000000;  // x32's calls, on x86-64

// Calls that no command needs. They fail with EPERM.
constexpr std::uint32_t kRefused[] = {
    __NR_socket,
    __NR_socketpair,
    __NR_connect,
    __NR_bind,
    __NR_listen,
    __NR_accept4,
    __NR_execve,
    __NR_execveat,
    __NR_process_vm_readv,
    __NR_process_vm_writev,
    __NR_mount,
    __NR_umount2,
    __NR_pivot_root,
    __NR_chroot,
    __NR_setns,
    __NR_unshare,
    __NR_bpf,
    __NR_perf_event_open,
    __NR_keyctl,
    __NR_add_key,
    __NR_request_key,
    __NR_userfaultfd,
    __NR_init_module,
    __NR_finit_module,
    __NR_delete_module,
    __NR_kexec_load,
    __NR_reboot,
    __NR_open_by_handle_at,
    425,  // io_uring_setup, which would go round this list
    428,  // open_tree
    429,  // move_mount
    430,  // fsopen
    438,  // pidfd_getfd
#if !RESHARD_LEAKS_ARE_LOOKED_FOR
    __NR_ptrace,  // LeakSanitizer looks at its own process that way
#endif
};

bool give_up_calls() {
  if (kArchitecture == 0) return false;
  constexpr auto load = [](std::size_t offset) {
    return sock_filter{BPF_LD | BPF_W | BPF_ABS, 0, 0, static_cast<std::uint32_t>(offset)};
  };
  constexpr sock_filter refuse{BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | EPERM};
  std::vector<sock_filter> program = {
      load(offsetof(seccomp_data, arch)), {BPF_JMP | BPF_JEQ | BPF_K, 1, 0, kArchitecture}, refuse,
      load(offsetof(seccomp_data, nr)),   {BPF_JMP | BPF_JGE | BPF_K, 0, 1, kOtherNumbers}, refuse,
  };
  for (const std::uint32_t call : kRefused) {
    program.push_back({BPF_JMP | BPF_JEQ | BPF_K, 0, 1, call});
    program.push_back(refuse);
  }
  program.push_back({BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW});
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0;
}

}  // namespace

Result<Sandboxed> enter_sandbox(const Sandbox& sandbox) {
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return Sandboxed();
  gave_up_files = TRY(give_up_files(sandbox));
  return Sandboxed{gave_up_files, give_up_calls()};
}

bool in_sandbox() { return gave_up_files; }

}  // namespace reshard

#else

namespace reshard {

Result<Sandboxed> enter_sandbox(const Sandbox&) { return Sandboxed(); }
bool in_sandbox() { return false; }

}  // namespace reshard

#endif
