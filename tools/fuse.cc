// SPDX-License-Identifier: Apache-2.0
// Uses the part of libfuse's low-level interface (fuse_lowlevel.h) that a constant tree needs.
//
// Worker threads take turns at the kernel's queue: one waits for a request and passes the turn on before it answers.
// The main thread watches the source and stops the others when the program is interrupted.
#define FUSE_USE_VERSION 31
#include "tools/fuse.h"

#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lib/base/find_function.h"
#include "lib/base/syscalls.h"
#include "lib/base/text.h"
#include "tools/commands.h"

namespace reshard::tools {
namespace {

constexpr double kForever = 1e9;     // seconds that the kernel may keep names and attributes
constexpr int kReadAheadKib = 1024;  // kernel's read-ahead, if it may be set
constexpr int kTickMs = 100;         // between checks for an interruption
constexpr int kTicksToWatch = 5;     // between checks of the source

// The library functions that are used, without their prefix "fuse_".
#define RESHARD_FUSE_FUNCTIONS(each)                                                                              \
  each(session_mount) each(session_unmount) each(session_destroy) each(session_exit) each(session_exited)         \
      each(session_fd) each(session_receive_buf) each(session_process_buf) each(reply_err) each(reply_entry)      \
          each(reply_attr) each(reply_open) each(reply_buf) each(reply_iov) each(add_direntry) each(req_userdata) \
              each(opt_free_args) each(lowlevel_notify_inval_inode) each(pkgversion)

struct FuseLibrary {
  // A macro in newer headers; the library still exports the function.
  fuse_session* (*session_new)(fuse_args*, const fuse_lowlevel_ops*, std::size_t, void*) = nullptr;
#define RESHARD_DECLARE_FUSE(name) decltype(&::fuse_##name) name = nullptr;  // NOLINT(bugprone-macro-parentheses)
  RESHARD_FUSE_FUNCTIONS(RESHARD_DECLARE_FUSE)
#undef RESHARD_DECLARE_FUSE
};

Result<FuseLibrary> load_fuse() {
  void* const opened =
      TRY(open_library({"libfuse3.so.3", "libfuse3.so.4"},
                       "libfuse 3 (Debian: libfuse3-3 and fuse3) is needed to mount, and cannot be opened"));
  FuseLibrary out;
  TRY(find_function(opened, "libfuse 3", "fuse_session_new", out.session_new));
#define RESHARD_FIND_FUSE(name) TRY(find_function(opened, "libfuse 3", "fuse_" #name, out.name));
  RESHARD_FUSE_FUNCTIONS(RESHARD_FIND_FUSE)
#undef RESHARD_FIND_FUSE
  return out;
}

// Loads the library once and never unloads it.
const Result<FuseLibrary>& fuse_library() {
  static const Result<FuseLibrary> loaded = load_fuse();
  return loaded;
}

// Precondition: serve_image() has loaded it.
const FuseLibrary& fuse() { return *fuse_library(); }

// Fails if /dev/fuse cannot be used.
Status check_device() {
  const int device = ::open("/dev/fuse", O_RDWR | O_CLOEXEC);
  const int why = errno;
  if (device >= 0) {
    ::close(device);
    return {};
  }
  const std::string what = std::string("/dev/fuse: ") + std::strerror(why);
  if (why == ENOENT || why == ENODEV || why == ENXIO)
    return unsupported(what +
                       ": mounting needs the kernel's fuse module (modprobe fuse), in a container the device, too "
                       "(docker run --device /dev/fuse --cap-add SYS_ADMIN)");
  return unsupported(what +
                     ": mounting needs to open it; in a container: docker run --device /dev/fuse --cap-add "
                     "SYS_ADMIN");
}

// A file or directory. Its number is its index; the root is 1.
struct Inode {
  std::string name;
  fuse_ino_t parent = FUSE_ROOT_ID;
  bool is_directory = true;
  std::uint32_t file = 0;                      // of the image
  std::map<std::string, fuse_ino_t> children;  // of a directory
};

class Tree {
 public:
  Tree(const ConvertedImage::Listing& listing, const FuseOptions& options) : listing_(listing), options_(options) {
    inodes_.resize(2);
    for (std::uint32_t f = 0; f < listing_.files.size(); ++f) add(listing_.files[f].path, f);
  }

  const std::vector<Inode>& inodes() const { return inodes_; }
  Index bytes_read() const { return bytes_read_; }

  // Makes the files readable. They are those that were listed.
  void show(ConvertedImage& files) {
    const std::lock_guard lock(shown_mutex_);
    files_ = &files;
    is_settled_ = true;
    shown_.notify_all();
  }
  // Fails all reads that still wait for the files.
  void stop_waiting() {
    const std::lock_guard lock(shown_mutex_);
    is_settled_ = true;
    shown_.notify_all();
  }
  // Waits for one of these two calls.
  bool can_be_read() {
    std::unique_lock lock(shown_mutex_);
    shown_.wait(lock, [&] { return is_settled_; });
    return files_ != nullptr;
  }

  // Returns whether the source is unchanged. After a change all reads fail.
  bool check_source() {
    if (changed_) return true;
    const Status unchanged = files_->unchanged();
    if (unchanged) return false;
    changed_ = true;
    report(unchanged.error().message() + "; unmount and mount it again");
    return true;
  }

  struct stat attributes(fuse_ino_t number) const {
    struct stat s {};
    const Inode& inode = inodes_[number];
    s.st_ino = number;
    s.st_mode = inode.is_directory ? S_IFDIR | 0555 : S_IFREG | 0444;
    s.st_nlink = inode.is_directory ? 2 : 1;
    s.st_uid = ::getuid();
    s.st_gid = ::getgid();
    s.st_size = inode.is_directory ? 0 : listing_.files[inode.file].size;
    s.st_blksize = 1 << 20;
    s.st_blocks = (s.st_size + 511) / 512;
    s.st_mtim.tv_sec = listing_.newest_ns / 1'000'000'000;
    s.st_mtim.tv_nsec = listing_.newest_ns % 1'000'000'000;
    s.st_ctim = s.st_atim = s.st_mtim;
    return s;
  }

  bool has_cheap_start(fuse_ino_t number) const {
    const Inode* const inode = find(number);
    return inode && !inode->is_directory && files_->cheap_start(inode->file) > 0;
  }

  // Returns the length of a direct read that does not go beyond a cheap start.
  Index cheap_length(const Inode& inode, Index offset, Index length) const {
    const Index start = files_->cheap_start(inode.file);
    return offset < start ? std::min(length, start - offset) : length;
  }

  const Inode* find(fuse_ino_t number) const { return number < inodes_.size() ? &inodes_[number] : nullptr; }

  void read(fuse_req_t request, const Inode& inode, Index offset, Index length) {
    if (changed_) {
      fuse().reply_err(request, EIO);
      return;
    }
    const auto parts = files_->image().read(inode.file, offset, length);
    if (!parts) {
      if (!interrupted() && !check_source()) report(parts.error().message());
      fuse().reply_err(request, EIO);
      return;
    }
    std::vector<iovec> pieces;
    Index n = 0;
    for (const Image::Part& part : *parts) {
      pieces.push_back({const_cast<std::byte*>(part.bytes.data()), part.bytes.size()});  // NOLINT: only read
      n += std::ssize(part.bytes);
    }
    bytes_read_ += n;
    fuse().reply_iov(request, pieces.data(), static_cast<int>(pieces.size()));
  }

  // Reports a failure. The kernel repeats failed requests, so each message is printed once.
  void report(const std::string& line) {
    {
      const std::lock_guard lock(reported_mutex_);
      if (line == last_reported_) return;
      last_reported_ = line;
    }
    options_.failed(line);
  }

 private:
  void add(const std::string& path, std::uint32_t file) {
    fuse_ino_t at = FUSE_ROOT_ID;
    const std::vector<std::string> parts = split(path, '/');
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto [there, is_new] = inodes_[at].children.emplace(parts[i], inodes_.size());
      const fuse_ino_t number = there->second;
      if (is_new) inodes_.push_back({parts[i], at, i + 1 < parts.size(), file, {}});
      at = number;
    }
  }

  ConvertedImage::Listing listing_;
  const FuseOptions& options_;
  std::vector<Inode> inodes_;  // by number
  std::mutex shown_mutex_;
  std::condition_variable shown_;
  bool is_settled_ = false;
  ConvertedImage* files_ = nullptr;  // constant once set
  std::atomic<bool> changed_{false};
  std::atomic<Index> bytes_read_{0};
  std::mutex reported_mutex_;
  std::string last_reported_;
};

Tree& tree_of(fuse_req_t request) { return *static_cast<Tree*>(fuse().req_userdata(request)); }

void on_init(void*, fuse_conn_info* connection) {
  connection->want &= ~static_cast<unsigned>(FUSE_CAP_SPLICE_READ);  // requests are short
}

void on_lookup(fuse_req_t request, fuse_ino_t parent, const char* name) {
  Tree& tree = tree_of(request);
  const Inode* const directory = tree.find(parent);
  const auto found = directory ? directory->children.find(name) : std::map<std::string, fuse_ino_t>::const_iterator();
  fuse_entry_param entry{};
  entry.attr_timeout = entry.entry_timeout = kForever;
  if (!directory || found == directory->children.end()) {
    fuse().reply_entry(request, &entry);  // number 0: does not exist, which may be cached
    return;
  }
  entry.ino = found->second;
  entry.attr = tree.attributes(entry.ino);
  fuse().reply_entry(request, &entry);
}

void on_getattr(fuse_req_t request, fuse_ino_t number, fuse_file_info*) {
  Tree& tree = tree_of(request);
  if (!tree.find(number)) {
    fuse().reply_err(request, ENOENT);
    return;
  }
  const struct stat attributes = tree.attributes(number);
  fuse().reply_attr(request, &attributes, kForever);
}

void on_open(fuse_req_t request, fuse_ino_t number, fuse_file_info* info) {
  Tree& tree = tree_of(request);
  if ((info->flags & O_ACCMODE) != O_RDONLY) {
    fuse().reply_err(request, EROFS);
  } else if (!tree.can_be_read() || tree.check_source()) {
    fuse().reply_err(request, EIO);
  } else {
    // Only direct reads may be answered with less than was requested, and are not widened by readahead.
    info->direct_io = tree.has_cheap_start(number);
    info->keep_cache = !info->direct_io;
    fuse().reply_open(request, info);
  }
}

void on_read(fuse_req_t request, fuse_ino_t number, std::size_t size, off_t offset, fuse_file_info* info) {
  Tree& tree = tree_of(request);
  const Inode& inode = *tree.find(number);
  // Direct reads have an owner. Those that fill pages, of a mapping, have none and must be answered in full.
  const bool is_direct = info && info->lock_owner != 0;
  tree.read(request, inode, offset, is_direct ? tree.cheap_length(inode, offset, size) : static_cast<Index>(size));
}

void on_readdir(fuse_req_t request, fuse_ino_t number, std::size_t size, off_t offset, fuse_file_info*) {
  Tree& tree = tree_of(request);
  const Inode* const directory = tree.find(number);
  if (!directory || !directory->is_directory) {
    fuse().reply_err(request, ENOTDIR);
    return;
  }
  std::vector<std::pair<std::string, fuse_ino_t>> entries = {{".", number}, {"..", directory->parent}};
  entries.insert(entries.end(), directory->children.begin(), directory->children.end());
  std::vector<char> buffer(size);
  std::size_t used = 0;
  for (std::size_t i = offset; i < entries.size(); ++i) {
    const struct stat attributes = tree.attributes(entries[i].second);
    const std::size_t n = fuse().add_direntry(request, buffer.data() + used, size - used, entries[i].first.c_str(),
                                              &attributes, static_cast<off_t>(i + 1));
    if (n > size - used) break;
    used += n;
  }
  fuse().reply_buf(request, buffer.data(), used);
}

// Catches exceptions, which must not reach the library's C code. A handler throws before it replies, or not at all.
template <auto answer, class... Args>
void guarded(fuse_req_t request, Args... args) {
  try {
    answer(request, args...);
  } catch (const std::bad_alloc&) {
    fuse().reply_err(request, ENOMEM);
  } catch (const std::exception& e) {
    tree_of(request).report(std::string("internal error: ") + e.what());
    fuse().reply_err(request, EIO);
  }
}

fuse_lowlevel_ops operations() {
  fuse_lowlevel_ops ops{};
  ops.init = on_init;
  ops.lookup = guarded<on_lookup>;
  ops.getattr = guarded<on_getattr>;
  ops.open = guarded<on_open>;
  ops.read = guarded<on_read>;
  ops.readdir = guarded<on_readdir>;
  return ops;
}

// A mounted session and the threads that answer it.
class Session {
 public:
  explicit Session(Tree& tree) : tree_(tree) {}
  ~Session() {
    stop();
    if (mounted_) fuse().session_unmount(session_);
    if (session_) fuse().session_destroy(session_);
    if (wake_ >= 0) ::close(wake_);
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Status mount(const std::string& directory) {
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) return io_error("eventfd: " + std::string(std::strerror(errno)));
    std::array<std::string, 3> words = {"reshard", "-o", "ro,fsname=reshard,subtype=reshard,default_permissions"};
    std::array<char*, 3> argv = {words[0].data(), words[1].data(), words[2].data()};
    fuse_args args = FUSE_ARGS_INIT(static_cast<int>(argv.size()), argv.data());
    const fuse_lowlevel_ops ops = operations();
    session_ = fuse().session_new(&args, &ops, sizeof ops, &tree_);
    fuse().opt_free_args(&args);
    if (!session_) return io_error("libfuse cannot create a session: " + std::string(std::strerror(errno)));
    if (fuse().session_mount(session_, directory.c_str()) != 0)
      return unsupported(
          printable(directory) +
          ": cannot mount here (see libfuse's message above): without root you need fusermount3 (Debian: "
          "fuse3) and to own the directory, a container CAP_SYS_ADMIN");
    mounted_ = true;
    const int queue = fuse().session_fd(session_);
    ::fcntl(queue, F_SETFL, ::fcntl(queue, F_GETFL) | O_NONBLOCK);
    return {};
  }

  void start(int threads) {
    for (int t = 0; t < threads; ++t) threads_.emplace_back([this] { answer(); });
  }

  void stop() {
    stopping_ = true;
    wake();
    tree_.stop_waiting();
    for (std::thread& t : threads_) t.join();
    threads_.clear();
  }

  bool is_over() const { return over_; }
  // Returns the errno that ended the session; 0 if it was unmounted or runs.
  int why() const { return why_; }

  // Drops the kernel's cached pages of these files.
  void forget_pages() {
    for (fuse_ino_t number = FUSE_ROOT_ID; number < tree_.inodes().size(); ++number)
      if (!tree_.inodes()[number].is_directory) (void)fuse().lowlevel_notify_inval_inode(session_, number, 0, 0);
  }

 private:
  void wake() const {
    const std::uint64_t one = 1;
    (void)!::write(wake_, &one, sizeof one);
  }

  void answer() {
    fuse_buf buffer{};
    while (receive(buffer)) fuse().session_process_buf(session_, &buffer);
    std::free(buffer.mem);  // libfuse allocated it
  }

  // Receives the next request; false at the end of the session.
  bool receive(fuse_buf& buffer) {
    const std::lock_guard lock(queue_mutex_);
    while (!stopping_ && !over_) {
      const int n = fuse().session_receive_buf(session_, &buffer);
      if (n > 0) return true;
      if (n == -EINTR) continue;
      if (n == -EAGAIN) {  // no request yet
        std::array<pollfd, 2> ends = {{{fuse().session_fd(session_), POLLIN, 0}, {wake_, POLLIN, 0}}};
        if (::poll(ends.data(), ends.size(), -1) < 0 && errno != EINTR) break;
        continue;
      }
      why_ = n < 0 ? -n : 0;
      break;
    }
    over_ = true;
    return false;
  }

  Tree& tree_;
  fuse_session* session_ = nullptr;
  bool mounted_ = false;
  int wake_ = -1;
  std::atomic<bool> stopping_{false}, over_{false};
  std::atomic<int> why_{0};
  std::mutex queue_mutex_;
  std::vector<std::thread> threads_;
};

// Raises the kernel's read-ahead. Needs root; without it reads are only slower.
void widen_read_ahead(const std::string& directory) {
  struct stat s {};
  if (sys().fstatat(AT_FDCWD, directory.c_str(), &s, 0) != 0) return;
  std::ofstream("/sys/class/bdi/" + std::to_string(major(s.st_dev)) + ":" + std::to_string(minor(s.st_dev)) +
                "/read_ahead_kb")
      << kReadAheadKib;
}

// A mounted tree.
class MountedTree {
 public:
  MountedTree(const ConvertedImage::Listing& listing, const FuseOptions& options)
      : tree_(listing, options), session_(tree_), options_(options) {}

  Status mount() {
    TRY(session_.mount(options_.directory));
    session_.start(std::max(2, options_.threads));
    widen_read_ahead(options_.directory);
    return {};
  }

  // Serves until the session ends.
  Status serve(ConvertedImage& files) {
    tree_.show(files);
    options_.ready(files.image().files());
    bool changed = false;
    for (int tick = 1; !session_.is_over() && !interrupted(); ++tick) {
      std::this_thread::sleep_for(std::chrono::milliseconds(kTickMs));
      if (tick % kTicksToWatch != 0) continue;
      if (!changed && tree_.check_source()) {
        changed = true;
        session_.forget_pages();
      }
      options_.progress(tree_.bytes_read());
    }
    if (session_.why() != 0)
      return io_error("cannot receive requests from the kernel: " + std::string(std::strerror(session_.why())));
    return {};
  }

 private:
  Tree tree_;
  Session session_;
  const FuseOptions& options_;
};

}  // namespace

Result<std::string> fuse_version() {
  if (!fuse_library()) return fuse_library().error();
  return std::string(fuse().pkgversion());
}

Status serve_image(const Listing& listing, const MakeImage& make, const FuseOptions& options) {
  if (!fuse_library()) return fuse_library().error();
  TRY(check_device());
  std::unique_ptr<ConvertedImage> files;
  std::unique_ptr<MountedTree> mounted;
  const auto mount = [&](const ConvertedImage::Listing& shown) {
    mounted.reset();
    mounted = std::make_unique<MountedTree>(shown, options);
    return mounted->mount();
  };
  if (listing) TRY(mount(*listing));
  files = TRY(make());
  if (const auto really = files->listing(); !listing || *listing != really) TRY(mount(really));
  return mounted->serve(*files);
}

}  // namespace reshard::tools
