#include "tests/support/power_loss.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <mutex>

#include "tests/support/checkpoints.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;
using Kind = DiskOperation::Kind;
constexpr std::size_t kUnit = 512;

int read_node(DiskState& state, const std::string& path) {
  const int number = static_cast<int>(state.nodes.size());
  state.nodes.emplace_back();
  if (!fs::is_directory(path)) {
    state.nodes.back().bytes = read_file(path);
    return number;
  }
  state.nodes.back().is_directory = true;
  for (const auto& entry : fs::directory_iterator(path)) {
    const int child = read_node(state, entry.path().string());
    state.nodes[static_cast<std::size_t>(number)].entries[entry.path().filename().string()] = child;
  }
  return number;
}

void write_node(const DiskState& state, int number, const std::string& path) {
  const DiskState::Node& node = state.nodes[static_cast<std::size_t>(number)];
  if (!node.is_directory) return write_file(path, node.bytes);
  fs::create_directory(path);
  for (const auto& [name, child] : node.entries) write_node(state, child, path + "/" + name);
}

std::string serialised(const DiskState& state, int number) {
  const DiskState::Node& node = state.nodes[static_cast<std::size_t>(number)];
  if (!node.is_directory) return "f" + std::to_string(node.bytes.size()) + ":" + node.bytes;
  std::string out = "d";
  for (const auto& [name, child] : node.entries) out += name + "\n" + serialised(state, child);
  return out + "\n";
}

}  // namespace

DiskState DiskState::read(const std::string& directory) {
  DiskState out;
  read_node(out, directory);
  return out;
}

void DiskState::write(const std::string& directory) const {
  fs::remove_all(directory);
  write_node(*this, 0, directory);
}

std::uint64_t DiskState::hash() const { return std::hash<std::string>()(serialised(*this, 0)); }

std::string DiskOperation::text() const {
  static const char* const kNames[] = {"make", "link", "remove", "move", "exchange", "write", "length", "sync"};
  return std::string(kNames[static_cast<int>(kind)]) + " " + name + (to_name.empty() ? "" : " -> " + to_name) +
         (kind == Kind::kWrite ? " " + std::to_string(bytes.size()) + " bytes at " + std::to_string(offset) : "");
}

// ---- recording

struct DiskRecorder::Recording {
  std::string root;
  DiskState before, now;  // `now` contains only names
  std::vector<DiskOperation> operations;
  std::map<int, std::pair<int, std::string>>
      descriptors;  // open files and directories below the root, with their paths
  Syscalls real;
  std::mutex mutex;

  std::optional<std::string> relative(const std::string& path) const {
    if (path == root) return std::string();
    return path.starts_with(root + "/") ? std::optional(path.substr(root.size() + 1)) : std::nullopt;
  }
  // Returns the node of a path below the root, or -1.
  int find(const std::string& path) const {
    const auto rest = relative(path);
    if (!rest) return -1;
    int at = 0;
    for (const fs::path& part : fs::path(*rest)) {
      const auto& entries = now.nodes[static_cast<std::size_t>(at)].entries;
      const auto entry = entries.find(part.string());
      if (entry == entries.end()) return -1;
      at = entry->second;
    }
    return at;
  }
  int directory_of(const std::string& path) const { return find(fs::path(path).parent_path().string()); }
  std::map<std::string, int>& entries(int directory) { return now.nodes[static_cast<std::size_t>(directory)].entries; }

  void make(const std::string& path, bool is_directory) {
    DiskOperation o;
    o.kind = Kind::kMake;
    o.node = static_cast<int>(now.nodes.size());
    o.is_directory = is_directory;
    o.directory = directory_of(path);
    o.name = fs::path(path).filename().string();
    now.nodes.push_back({is_directory, "", {}});
    entries(o.directory)[o.name] = o.node;
    operations.push_back(std::move(o));
  }
  // Adds an operation on a name in a directory.
  void add(Kind kind, int node, const std::string& path) {
    DiskOperation o;
    o.kind = kind;
    o.node = node;
    o.directory = directory_of(path);
    o.name = fs::path(path).filename().string();
    operations.push_back(std::move(o));
  }
  void link(const std::string& from, const std::string& to) {
    add(Kind::kLink, find(from), to);
    entries(directory_of(to))[fs::path(to).filename().string()] = find(from);
  }
  void remove(const std::string& path) {
    add(Kind::kRemove, find(path), path);
    entries(directory_of(path)).erase(fs::path(path).filename().string());
  }
  void move(const std::string& from, const std::string& to, bool is_exchange) {
    DiskOperation o;
    o.kind = is_exchange ? Kind::kExchange : Kind::kMove;
    o.node = find(from);
    o.other = is_exchange ? find(to) : -1;
    o.directory = directory_of(from);
    o.to = directory_of(to);
    o.name = fs::path(from).filename().string();
    o.to_name = fs::path(to).filename().string();
    if (is_exchange)
      entries(o.directory)[o.name] = o.other;
    else
      entries(o.directory).erase(o.name);
    entries(o.to)[o.to_name] = o.node;
    operations.push_back(std::move(o));
  }
  // Adds an operation on an open file. Ignores files outside the root.
  void add(Kind kind, int fd, std::uint64_t offset, std::string bytes) {
    const auto it = descriptors.find(fd);
    if (it == descriptors.end()) return;
    DiskOperation o;
    o.kind = kind;
    o.node = it->second.first;
    o.name = it->second.second;
    o.offset = offset;
    o.bytes = std::move(bytes);
    operations.push_back(std::move(o));
  }
};

namespace {

DiskRecorder::Recording* recording = nullptr;

// Makes a call and, if it succeeds, records it, while no other thread makes one. Returns its result.
template <class Call, class Note>
auto noted(Call call, Note note) {
  const std::lock_guard lock(recording->mutex);
  const auto result = call();
  if (result >= 0) note(result);
  return result;
}

Syscalls recording_calls(const Syscalls& real) {
  Syscalls c = real;
  c.open = [](const char* path, int flags, mode_t mode) {
    return noted([&] { return recording->real.open(path, flags, mode); },
                 [&](int fd) {
                   if ((flags & O_TMPFILE) == O_TMPFILE || !recording->relative(path)) return;
                   if (recording->find(path) < 0) recording->make(path, false);
                   recording->descriptors[fd] = {recording->find(path), fs::path(path).filename().string()};
                   if ((flags & O_TRUNC) != 0) recording->add(Kind::kLength, fd, 0, "");
                 });
  };
  c.close = [](int fd) {
    const std::lock_guard lock(recording->mutex);
    recording->descriptors.erase(fd);
    return recording->real.close(fd);
  };
  c.pwrite = [](int fd, const void* bytes, std::size_t n, off_t offset) {
    return noted([&] { return recording->real.pwrite(fd, bytes, n, offset); },
                 [&](ssize_t done) {
                   recording->add(Kind::kWrite, fd, static_cast<std::uint64_t>(offset),
                                  {static_cast<const char*>(bytes), static_cast<std::size_t>(done)});
                 });
  };
  c.write = [](int fd, const void* bytes, std::size_t n) {
    return noted([&] { return recording->real.write(fd, bytes, n); },
                 [&](ssize_t done) {
                   const off_t end = ::lseek(fd, 0, SEEK_CUR);  // fails for a pipe, which is not recorded
                   recording->add(Kind::kWrite, fd, static_cast<std::uint64_t>(end - done),
                                  {static_cast<const char*>(bytes), static_cast<std::size_t>(done)});
                 });
  };
  c.fallocate = [](int fd, int mode, off_t offset, off_t length) {
    return noted([&] { return recording->real.fallocate(fd, mode, offset, length); },
                 [&](int) { recording->add(Kind::kLength, fd, static_cast<std::uint64_t>(offset + length), ""); });
  };
  c.ftruncate = [](int fd, off_t length) {
    return noted([&] { return recording->real.ftruncate(fd, length); },
                 [&](int) { recording->add(Kind::kLength, fd, static_cast<std::uint64_t>(length), ""); });
  };
  c.fdatasync =
      c.fsync = [](int fd) { return noted([] { return 0; }, [&](int) { recording->add(Kind::kSync, fd, 0, ""); }); };
  c.mkdir = [](const char* path, mode_t mode) {
    return noted([&] { return recording->real.mkdir(path, mode); },
                 [&](int) {
                   if (recording->relative(path)) recording->make(path, true);
                 });
  };
  c.rename = [](const char* from, const char* to, unsigned flags) {
    return noted([&] { return recording->real.rename(from, to, flags); },
                 [&](int) {
                   if (recording->relative(to)) recording->move(from, to, (flags & RENAME_EXCHANGE) != 0);
                 });
  };
  c.link = [](const char* from, const char* to) {
    return noted([&] { return recording->real.link(from, to); },
                 [&](int) {
                   if (recording->relative(to)) recording->link(from, to);
                 });
  };
  c.unlink = [](const char* path) {
    return noted([&] { return recording->real.unlink(path); },
                 [&](int) {
                   if (recording->relative(path)) recording->remove(path);
                 });
  };
  c.rmdir = [](const char* path) {
    return noted([&] { return recording->real.rmdir(path); },
                 [&](int) {
                   if (recording->relative(path)) recording->remove(path);
                 });
  };
  return c;
}

}  // namespace

DiskRecorder::DiskRecorder(const std::string& directory) : recording_(std::make_unique<Recording>()) {
  recording_->root = directory;
  recording_->before = recording_->now = DiskState::read(directory);
  recording_->real = sys();
  recording = recording_.get();
  scoped_.emplace(recording_calls(recording_->real));
}
DiskRecorder::~DiskRecorder() { scoped_.reset(); }

const DiskState& DiskRecorder::before() const { return recording_->before; }
const std::vector<DiskOperation>& DiskRecorder::operations() const { return recording_->operations; }

Syscalls without_rename_flags() {
  static Syscalls real;
  real = sys();
  Syscalls c = real;
  c.rename = [](const char* from, const char* to, unsigned flags) {
    if (flags == 0) return real.rename(from, to, 0);
    errno = EINVAL;
    return -1;
  };
  return c;
}

// ---- The remaining state

std::vector<int> open_operations(const std::vector<DiskOperation>& all, int end, bool lies) {
  std::vector<int> out;
  for (int i = 0; i < end; ++i) {
    const DiskOperation& o = all[static_cast<std::size_t>(i)];
    if (o.kind == Kind::kSync) continue;
    bool is_forced = false;
    for (int s = i + 1; s < end && !is_forced && !lies; ++s) {
      const DiskOperation& sync = all[static_cast<std::size_t>(s)];
      if (sync.kind != Kind::kSync) continue;
      const bool is_data = o.kind == Kind::kWrite || o.kind == Kind::kLength;
      const bool is_move = o.kind == Kind::kMove || o.kind == Kind::kExchange;
      is_forced = is_data ? sync.node == o.node : sync.node == o.directory || (is_move && sync.node == o.to);
    }
    if (!is_forced) out.push_back(i);
  }
  return out;
}

namespace {

void write_bytes(std::string& file, const DiskOperation& o, bool is_torn, std::mt19937& random) {
  const std::size_t end = o.offset + o.bytes.size();
  // A torn write loses its end, its middle, or all of its bytes but not its length. The missing bytes are the old ones,
  // zeros, or those of another file.
  const unsigned way = random() % 4;
  if (file.size() < end && (!is_torn || way != 0)) file.resize(end, is_torn && way == 1 ? '\x5a' : '\0');
  const std::size_t kept = is_torn && way == 0 ? random() % o.bytes.size() / kUnit * kUnit : o.bytes.size();
  for (std::size_t at = o.offset; at < o.offset + kept;) {
    const std::size_t next = std::min(o.offset + kept, (at / kUnit + 1) * kUnit);
    const bool is_lost = is_torn && way != 0 && (way == 3 || random() % 2 == 0);
    if (file.size() < next) file.resize(next, '\0');
    if (!is_lost) file.replace(at, next - at, o.bytes, at - o.offset, next - at);
    at = next;
  }
}

void apply(DiskState& state, const DiskOperation& o, bool is_torn, std::mt19937& random) {
  const auto node = [&](int n) -> DiskState::Node& { return state.nodes[static_cast<std::size_t>(n)]; };
  const auto take_away = [&] {
    auto& entries = node(o.directory).entries;
    if (const auto it = entries.find(o.name); it != entries.end() && it->second == o.node) entries.erase(it);
  };
  switch (o.kind) {
    case Kind::kMake:
    case Kind::kLink:
      node(o.directory).entries[o.name] = o.node;
      break;
    case Kind::kRemove:
      take_away();
      break;
    case Kind::kMove:
      take_away();
      node(o.to).entries[o.to_name] = o.node;
      break;
    case Kind::kExchange:
      node(o.directory).entries[o.name] = o.other;
      node(o.to).entries[o.to_name] = o.node;
      break;
    case Kind::kWrite:
      write_bytes(node(o.node).bytes, o, is_torn, random);
      break;
    case Kind::kLength:
      node(o.node).bytes.resize(o.offset, '\0');
      break;
    case Kind::kSync:
      break;
  }
}

}  // namespace

DiskState state_after(const DiskState& before, const std::vector<DiskOperation>& all, int end,
                      const std::vector<int>& open, const std::vector<Fate>& fates, std::mt19937& random) {
  DiskState out = before;
  for (const DiskOperation& o : all)
    if (o.kind == Kind::kMake) out.nodes.push_back({o.is_directory, "", {}});
  std::size_t next = 0;
  for (int i = 0; i < end; ++i) {
    Fate fate = Fate::kDone;
    if (next < open.size() && open[next] == i) fate = fates[next++];
    if (fate != Fate::kLost) apply(out, all[static_cast<std::size_t>(i)], fate == Fate::kTorn, random);
  }
  return out;
}

}  // namespace reshard
