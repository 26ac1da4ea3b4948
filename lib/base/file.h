// Files: open, read at, write at, and the few directory operations a checkpoint needs. Every message names the path and
// the operating system's reason.
#pragma once

#include <limits>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "lib/base/cursor.h"
#include "lib/base/result.h"

namespace reshard {

// An open file. Owns its descriptor. read_at and write_at may be called from several threads at once.
class File {
 public:
  // kWriteDirect bypasses the page cache: offsets, lengths and addresses must be multiples of kDirectUnit. Not every
  // file system offers it; open() then fails.
  enum class Access { kRead, kReadWrite, kWriteDirect };
  static constexpr Index kDirectUnit = 4096;
  // An existing file; refuses anything but a regular one.
  static Result<File> open(const std::string& path, Access access = Access::kRead);
  // Read-write and new: an existing file or link of that name is an error.
  static Result<File> create(const std::string& path);
  // Read-write, and gone when closed: has no name. In `directory`.
  static Result<File> create_anonymous(const std::string& directory);
  static Result<File> create_in_memory();  // likewise, in no directory: for a few bytes

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  // The same file once more, for reading past the page cache, whatever has become of its name. An error where the file
  // system does not offer that.
  Result<File> reopen_direct() const;

  const std::string& path() const { return path_; }
  int descriptor() const { return fd_; }  // the file's own: not to be closed
  Result<Index> size() const;

  // Fills all of `out`; an end of file before that is a corrupt error that says how much was there.
  Status read_at(Index offset, MutableBytes out) const;
  Status write_at(Index offset, Bytes data) const;

  // Whether the kernel is to read on behind what is asked for: of scattered reads it would fetch many times their
  // bytes.
  enum class Reads { kInOrder, kScattered };
  void expect(Reads reads) const;

  // Sets the length and reserves the blocks, so that a full disk shows now and not halfway. Falls back to a sparse
  // file where the file system cannot reserve.
  Status allocate(Index length) const;
  Status set_length(Index length) const;  // without reserving: what is not written is a hole and reads as zeros
  Status sync_data() const;               // an error here is final: the kernel has dropped the pages
  Status close();                         // reports what a destructor could not

 private:
  File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_ = -1;
  std::string path_;
};

// Reads a whole file that must not be longer than `limit` bytes.
Result<std::string> read_whole_file(const std::string& path, Index limit);
// Reads the first `length` bytes of a file, or all of it where it is shorter.
Result<std::string> read_file_start(const std::string& path, Index length);
// Makes a file of this text, or replaces the regular one of that name: readers see the old text or all of the new one,
// and on an error the old one is as it was. A link, pipe or device of that name is written to and stays what it is.
// Without `replace` an existing name is an error.
Status replace_file(const std::string& path, std::string_view text, bool replace = true);

struct DirectoryEntry {
  std::string name;
  bool is_directory = false;
  Index size = 0;  // bytes; 0 for a directory
  Index mtime_ns = 0;
};
// Regular files and directories, sorted by name, without "." and "..". Links are followed; one that leads nowhere is
// left out.
Result<std::vector<DirectoryEntry>> list_directory(const std::string& path);
// The file or directory at a path, by its own name, links followed; nothing where there is none.
Result<std::optional<DirectoryEntry>> entry_at(const std::string& path);

// What stands under a name, links not followed: enough to tell later whether it is still the same.
struct Node {
  std::string name;
  std::uint64_t device = 0, inode = 0;
  std::uint32_t mode = 0;        // as stat has it: kind and permissions
  Index size = 0, mtime_ns = 0;  // of files and links
  bool is_directory() const;
  bool is_regular() const;
  bool is_link() const;

  friend bool operator==(const Node&, const Node&) = default;
};
Result<Node> look_at(const std::string& path);  // its name is empty
// Everything below a directory, by names relative to it, directories before what is in them.
Result<std::vector<Node>> walk(const std::string& directory);
// Whether `path` is `directory` or lies below it, links followed. False where it does not exist.
bool lies_in(const std::string& path, const std::string& directory);

bool path_exists(const std::string& path);  // also a dangling link
bool is_directory(const std::string& path);
std::string path_join(std::string_view directory, std::string_view name);
std::string parent_path(const std::string& path);  // "a/b/" -> "a", "b" -> "."
std::string base_name(const std::string& path);    // "a/b/" -> "b"
// A directory by the name that it has in its parent, if `path` ends in "." or ".."; any other path as it is.
std::string by_own_name(const std::string& path);
// Whether a file system is mounted there, so that nothing else can be moved to its name.
bool is_mount_point(const std::string& path);

// Whether a name found inside a checkpoint (relative_path, weight_map) stays inside its directory: not empty, not
// absolute, no "..", no NUL, no backslash.
bool is_safe_relative_path(std::string_view name);

Status make_directory(const std::string& path);
Status remove_file(const std::string& path);
Status rename_no_replace(const std::string& from, const std::string& to);
Status exchange_paths(const std::string& a, const std::string& b);  // swaps two names atomically
Status sync_directory(const std::string& path);
Status remove_directory(const std::string& path);  // an empty one
// Removes a directory and what is in it. Follows no links.
Status remove_tree(const std::string& path);
Result<Index> free_space(const std::string& path);  // bytes an unprivileged user may still write there

// Takes all the descriptors that the system lets this process have (RLIMIT_NOFILE's hard limit), for FilePool to keep
// files open with. For programs: a library leaves limits alone.
void raise_descriptor_limit();

// What pools may keep open together: the files used last, whichever pool they are of.
class OpenFiles {
 public:
  explicit OpenFiles(Index most) : most_(most) {}
  // Of this process: half of the descriptors that it may have when it is first asked for.
  static OpenFiles& of_process();

 private:
  friend class FilePool;
  struct Use;
  using Uses = std::list<Use>;
  struct Pool {
    std::unordered_map<std::string, Uses::iterator> files;                // by path
    std::unordered_map<std::string, std::shared_ptr<const File>> pinned;  // by name
    File::Reads reads = File::Reads::kInOrder;
  };
  struct Use {
    Pool* pool;
    std::string path;
    std::shared_ptr<const File> file;
  };
  void make_room();  // for one more, as far as pinned files allow

  const Index most_;
  std::mutex mutex_;
  Index pinned_ = 0;
  Uses uses_;  // of files that are not pinned, the last one first
};

// Opens files on demand and keeps the most recently used ones open. Thread-safe. Copies are the same pool.
class FilePool {
 public:
  explicit FilePool(File::Access access = File::Access::kRead, OpenFiles& all = OpenFiles::of_process())
      : state_(std::make_shared<State>(access, all)) {}
  // The file stays open while the caller holds it, even when the pool has let go of it.
  Result<std::shared_ptr<const File>> open(const std::string& path);
  // Of all its files, those that it opens from now on among them.
  void expect(File::Reads reads);
  // Hands a file to the pool under a name of the caller's; it is never let go of.
  void pin(const std::string& name, File file);

 private:
  struct State {
    State(File::Access access_to_files, OpenFiles& all_files) : access(access_to_files), all(all_files) {}
    ~State();
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    const File::Access access;
    OpenFiles& all;
    OpenFiles::Pool files;  // under its mutex
  };
  std::shared_ptr<State> state_;
};

}  // namespace reshard
