// SPDX-License-Identifier: Apache-2.0
// reshard mount.
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "lib/base/memory_limit.h"
#include "lib/base/output_guard.h"
#include "lib/base/printable.h"
#include "lib/base/shell.h"
#include "lib/base/syscalls.h"
#include "lib/base/text.h"
#include "lib/convert/converted_image.h"
#include "lib/convert/delta_chain.h"
#include "tools/commands.h"
#include "tools/fuse.h"
#include "tools/outputs.h"
#include "tools/plan_report.h"

namespace reshard::tools {
namespace {

struct MountOptions : ConvertOptions {
  std::string log;
  std::vector<std::string> deltas;
  bool check = false, background = false;
};

Status check_mount_point(const std::string& directory) {
  constexpr auto kFuseMagic = 0x65735546;  // linux/magic.h, FUSE_SUPER_MAGIC
  const std::string name = printable(directory);
  // statfs() asks the process behind the mount; the kernel may still have what stat() needs in its cache.
  struct statfs system {};
  struct stat s {};
  if (::statfs(directory.c_str(), &system) != 0 || sys().fstatat(AT_FDCWD, directory.c_str(), &s, 0) != 0) {
    if (errno == ENOTCONN)
      return io_error(name + ": stale mount of a process that has ended; remove it: fusermount3 -u " +
                      shell_path(directory));
    return io_error(name + ": " + std::strerror(errno) + "; expected an empty directory to mount on");
  }
  if (!S_ISDIR(s.st_mode)) return usage_error(name + ": is not a directory");
  if (system.f_type == kFuseMagic && s.st_ino == 1) return usage_error(name + ": already a mount point");
  if (!TRY(list_directory(directory)).empty())
    return usage_error(name + ": not empty; its files would be hidden. Choose an empty directory");
  return {};
}

// Continues in a process without a terminal, which tells its parent when it is ready.
class Background {
 public:
  // Forks. The parent returns the child's exit code once the child is ready or has failed; the child returns nothing.
  Result<std::optional<int>> split() {
    null_ = log_ = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null_ < 0) return io_error(std::string("/dev/null: ") + std::strerror(errno));
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) return io_error(std::string("pipe: ") + std::strerror(errno));
    (void)interrupted();  // so that a signal no longer ends this process alone
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child < 0) return io_error(std::string("fork: ") + std::strerror(errno));
    ::close(ends[child == 0 ? 0 : 1]);
    if (child == 0) {
      ::setsid();
      ready_ = ends[1];
      return std::optional<int>();
    }
    const bool is_ready = wait_until_ready(ends[0]);
    ::close(ends[0]);
    if (is_ready) return std::optional(0);
    if (interrupted()) ::kill(child, SIGTERM);  // the child has left the terminal, whose Ctrl-C it does not get
    int status = 0;
    while (::waitpid(child, &status, 0) < 0)
      if (errno != EINTR) return io_error(std::string("waitpid: ") + std::strerror(errno));
    if (interrupted()) return std::optional(128 + ending_signal());
    return std::optional(WIFEXITED(status) ? WEXITSTATUS(status) : static_cast<int>(ErrorCode::kInternal));
  }

  // In the child: sends messages after leave_terminal() to this file. Otherwise they are dropped.
  Status report_to(const std::string& log) {
    log_ = sys().open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    return log_ < 0 ? io_error(printable(log) + ": " + std::strerror(errno)) : Status();
  }

  // In the child: tells the parent that it is ready, and detaches.
  void leave_terminal() const {
    if (ready_ < 0) return;
    std::fflush(nullptr);
    ::dup2(null_, STDIN_FILENO);
    ::dup2(null_, STDOUT_FILENO);
    ::dup2(log_, STDERR_FILENO);
    const char byte = 1;
    (void)!::write(ready_, &byte, 1);
    ::close(ready_);
  }

 private:
  // Returns whether the child is ready. Otherwise it has ended, or a signal has interrupted the parent.
  static bool wait_until_ready(int end) {
    constexpr int kReadyTickMs = 100;
    while (!interrupted()) {
      pollfd ready = {end, POLLIN, 0};
      char byte = 0;
      if (::poll(&ready, 1, kReadyTickMs) > 0) return ::read(end, &byte, 1) == 1;
    }
    return false;
  }

  int ready_ = -1, null_ = -1, log_ = -1;
};

// Keeps freed slabs in the allocator: they are needed again soon, and fresh pages cost as much as copying into them.
void keep_freed_memory() {
  constexpr int kLargestSlab = 4 << 20, kKept = 16 << 20;  // bytes
  ::mallopt(M_MMAP_THRESHOLD, kLargestSlab);
  ::mallopt(M_TRIM_THRESHOLD, kKept);
}

Result<int> mount_image(const MountOptions& options) {
  TRY(check_mount_point(options.destination));
  Background background;
  if (options.background)
    if (const auto exit_code = TRY(background.split())) return *exit_code;
  // One thread allocates a slab and another frees it. An arena per thread would hold a seventh more memory.
  ::mallopt(M_ARENA_MAX, 1);
  PreparedConversion prepared = TRY(open_sources(options, true));
  const std::vector<Tensor>& stored = prepared.source.reader->catalog().tensors();
  const bool is_located = std::all_of(stored.begin(), stored.end(), [](const Tensor& t) { return t.located; });
  // Lists names and sizes from the metadata first, so that `ls` need not wait until the bytes of the source are
  // located. Skipped in the background, where nobody looks before the exit code, and if everything is located already.
  Listing listing;
  if (!options.background && !is_located) {
    TRY(prepare_again(prepared, PlanOf::kSizes));
    listing = TRY(ConvertedImage::list(*prepared.conversion));
  }
  const bool quiet = options.resources.quiet;
  const MakeImage make = [&]() -> Result<std::unique_ptr<ConvertedImage>> {
    TRY(prepare_again(prepared, PlanOf::kData));
    if (!options.log.empty()) {
      TRY(check_spares_inputs(options.log, prepared.conversion->inputs()));
      TRY(check_report(options.log, kLog));
      TRY(background.report_to(options.log));
    }
    if (!quiet) print_view_plan(prepared);
    auto files = TRY(ConvertedImage::open(*prepared.conversion, options.check));
    keep_freed_memory();
    return files;
  };
  const bool redraws = !quiet && !options.background && stderr_is_terminal();
  Index shown = -1;

  FuseOptions how;
  how.directory = options.destination;
  RunOptions run;
  run.threads = options.resources.threads;
  how.threads = worker_count(run);
  how.ready = [&](const std::vector<Image::FileEntry>& entries) {
    if (!quiet) {
      Index bytes = 0;
      for (const auto& file : entries) bytes += file.size;
      print_row("mounted", printable(options.destination) + "   " + count_of(std::ssize(entries), "file") + ", " +
                               human_bytes(bytes) + (options.check ? "   verified before use" : ""));
      print_row("", (options.background ? "process " + std::to_string(::getpid()) + "; " : "Ctrl-C or ") +
                        "fusermount3 -u " + shell_path(options.destination) + " ends it");
      std::fflush(stdout);
    }
    background.leave_terminal();
  };
  how.progress = [&](Index bytes) {
    if (!redraws || bytes == shown) return;
    shown = bytes;
    std::fprintf(stderr, "\rread      %s\x1b[K", human_bytes(bytes).c_str());
  };
  how.failed = [&](const std::string& line) {
    std::fputs("reshard: error: ", stderr);
    print_lines(stderr, line);
    std::fputc('\n', stderr);
  };
  TRY(serve_image(listing, make, how));
  if (redraws && shown >= 0) std::fprintf(stderr, "\r\x1b[K");
  if (!quiet && !options.background) print_row("done", printable(options.destination) + " is unmounted");
  return 0;
}

}  // namespace

void add_mount(CommandLine& line) {
  auto options = std::make_shared<MountOptions>();
  line.add_option("SRC", options->source, "Checkpoint to read: a directory or a file").read().required();
  line.add_option("DIR", options->destination, "Empty directory to mount on").written().required();
  options->add_format(line, "--as", "Format to present", false);
  line.group("Run");
  line.add_flag("--check", options->check, "Verify an item's checksum before serving any of its bytes").common();
  line.add_flag("--background", options->background, "Return as soon as the checkpoint is mounted").common();
  line.add_option("--log", options->log, "Append failed reads to this file, with --background").written(kLog);
  line.group("Source");
  line.add_option("--delta", options->deltas, "Apply this delta to SRC first; several apply in order")
      .read()
      .takes("D");
  options->add_changes(line);
  for (const char* const option : {"--codec", "--shuffle", "--strategy", "--transport"}) line.option(option).hidden();
  line.examples(
      {{"mkdir model; reshard mount step-1000 model --as hf", "until Ctrl-C"},
       {"reshard mount step-1000 model --as hf --dtype bfloat16 --background", "until fusermount3 -u model"}});
  line.description(
      "Nothing is written to disk: the bytes that convert would write are computed when they are read. See "
      "docs/mount.md.");
  line.action([options]() -> Result<int> {
    if (!options->log.empty() && !options->background) return usage_error("--log needs --background");
    if (!options->deltas.empty()) options->merge = patch_options(options->source, options->deltas);
    return mount_image(*options);
  });
}

}  // namespace reshard::tools
