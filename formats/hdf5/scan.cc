// SPDX-License-Identifier: Apache-2.0
#include "formats/hdf5/scan.h"

#include <hdf5.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <memory>
#include <set>

#include "formats/encoding/key_path.h"
#include "formats/hdf5/hdf5.h"
#include "formats/hdf5/library.h"
#include "formats/hdf5/names.h"
#include "formats/hdf5/types.h"
#include "lib/base/file.h"
#include "lib/base/storage/url.h"
#include "lib/base/text.h"
#include "lib/device/codec.h"

namespace reshard::hdf5 {
namespace {

constexpr int kMaxDepth = 256;          // levels of groups
constexpr std::size_t kMaxLink = 4096;  // bytes of a link's name
constexpr int kMaxFilters = 8;
// The limit for all paths and names together. A group's name is in the path of everything below it, and links are
// cheap.
constexpr Index kNameBytesPerByte = 16;  // for each byte of the file
constexpr Index kFreeNameBytes = Index{4} << 20;
constexpr std::size_t kSaid = 1000;     // most bytes of a path in messages
constexpr unsigned kScanSeconds = 60;   // of the processor, after which metadata count as damaged
constexpr unsigned kWaitSeconds = 600;  // after which the disk counts as broken
constexpr int kNoMemory = 1;            // exit code of a child in which libhdf5 crashed without memory

class Scanner {
 public:
  Scanner(std::string path, bool external_too) : path_(std::move(path)), external_too_(external_too) {}
  Result<Listing> run();

 private:
  Status charge(const std::string& name);
  Status visit_group(Id group, const std::string& path, int depth);
  Status visit_link(Id group, const std::string& path, const char* name, int depth);
  Status visit_dataset(Id dataset, const std::string& path);
  Status add_tensor(Id dataset, const std::string& path, const std::string& place);
  Status add_own(Id dataset, const std::string& path, const std::string& place);
  Result<bool> is_bfloat16_of_keras(Id dataset, Id type, const std::string& place) const;
  Result<Dims> shape_of(Id dataset);
  Status locate(Id dataset, Tensor& tensor, bool big_endian, const std::string& place);
  Status locate_contiguous(Id dataset, Tensor& tensor, bool big_endian);
  Status locate_external(Id creation, Tensor& tensor, bool big_endian);
  Status locate_chunks(Id dataset, Id creation, Tensor& tensor, bool big_endian, const std::string& place);
  Result<std::vector<ChunkFilter>> filters_of(Id creation, Index element_bytes);
  Result<std::uint32_t> file_number(const std::string& stored);
  std::string place_of(const std::string& path) const {
    return path_ + ": '" + printable(path.substr(0, kSaid)) + (path.size() > kSaid ? "'..." : "'");
  }

  std::string path_;
  bool external_too_;
  Listing listing_;
  std::set<std::uint64_t> groups_seen_;  // by address; links may form cycles
  bool is_of_keras_ = false;             // in its legacy format (keras/src/legacy/saving/legacy_h5_format.py)
  Index objects_ = 0;
  Index name_bytes_left_ = 0;
  Index links_skipped_ = 0;
};

// The names of a group's links. The library iterates with a callback, so errors are reported after it ends.
struct LinkNames {
  std::vector<std::string> names;
  bool too_many = false;
  bool too_long = false;
};

herr_t collect_link(hid_t, const char* name, const H5L_info_t*, void* out) {
  auto& links = *static_cast<LinkNames*>(out);
  const std::size_t length = ::strnlen(name, kMaxLink + 1);
  links.too_long = length > kMaxLink;
  links.too_many = std::ssize(links.names) >= kMaxObjects;
  if (links.too_long || links.too_many) return -1;
  links.names.emplace_back(name, length);
  return 0;
}

Result<Listing> Scanner::run() {
  if (is_url(path_)) return unsupported(path_ + ": libhdf5 reads only local files; download it first");
  const LibraryLock lock;
  listing_.catalog.root = parent_path(path_);
  const File file = TRY(File::open(path_));
  const Index size = TRY(file.size());
  listing_.catalog.files = {{base_name(path_), size}};
  name_bytes_left_ = checked_mul(size, kNameBytesPerByte).value_or(INT64_MAX - kFreeNameBytes) + kFreeNameBytes;
  const Handle access = TRY(checked(H5Pcreate(H5P_FILE_ACCESS), ErrorCode::kInternal, path_));
  H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG);
  const Handle open = TRY(checked(H5Fopen(path_.c_str(), H5F_ACC_RDONLY, access.get()), ErrorCode::kCorrupt, path_));
  const Handle creation = TRY(checked(H5Fget_create_plist(open.get()), ErrorCode::kCorrupt, path_));
  hsize_t user_block = 0;
  if (H5Pget_userblock(creation.get(), &user_block) >= 0 && user_block > 0)
    return unsupported(path_ + ": " + bytes_of(user_block) +
                       " of other data precede the HDF5 data (a user block); remove them with h5unjam");
  const Handle root = TRY(checked(H5Gopen2(open.get(), "/", H5P_DEFAULT), ErrorCode::kCorrupt, path_));
  H5O_info_t object{};
  TRY(checked_call(H5Oget_info2(root.get(), &object, H5O_INFO_BASIC), ErrorCode::kCorrupt, path_));
  groups_seen_.insert(object.addr);
  const htri_t has_version = H5Aexists(root.get(), "keras_version");
  TRY(checked_call(has_version, ErrorCode::kCorrupt, path_));
  is_of_keras_ = has_version > 0;
  TRY(visit_group(root.get(), "", 0));
  if (links_skipped_ > 0)
    listing_.catalog.warnings.push_back(count_of(links_skipped_, "soft or external link") + " not followed.");
  return std::move(listing_);
}

Status Scanner::visit_group(Id group, const std::string& path, int depth) {
  if (depth > kMaxDepth) return corrupt(place_of(path) + ": groups nested deeper than " + std::to_string(kMaxDepth));
  LinkNames links;
  const herr_t walked = H5Literate(group, H5_INDEX_NAME, H5_ITER_INC, nullptr, collect_link, &links);
  if (links.too_long) return corrupt(place_of(path) + ": a link of more than " + std::to_string(kMaxLink) + " bytes");
  if (links.too_many) return corrupt(place_of(path) + ": more than " + with_commas(kMaxObjects) + " links");
  TRY(checked_call(walked, ErrorCode::kCorrupt, place_of(path)));
  std::sort(links.names.begin(), links.names.end(), natural_less);
  for (const std::string& name : links.names)
    TRY(visit_link(group, path.empty() ? name : path + "/" + name, name.c_str(), depth));
  return {};
}

Status Scanner::charge(const std::string& name) {
  name_bytes_left_ -= std::ssize(name);
  if (name_bytes_left_ >= 0) return {};
  return corrupt(path_ + ": the paths and names of its objects are more than " + std::to_string(kNameBytesPerByte) +
                 " times the file: long ones are used too often");
}

Status Scanner::visit_link(Id group, const std::string& path, const char* name, int depth) {
  TRY(charge(path));
  H5L_info_t link{};
  TRY(checked_call(H5Lget_info(group, name, &link, H5P_DEFAULT), ErrorCode::kCorrupt, place_of(path)));
  if (link.type != H5L_TYPE_HARD) {
    ++links_skipped_;
    return {};
  }
  if (++objects_ > kMaxObjects) return corrupt(path_ + ": more than " + with_commas(kMaxObjects) + " objects");
  H5O_info_t object{};
  TRY(checked_call(H5Oget_info_by_name2(group, name, &object, H5O_INFO_BASIC, H5P_DEFAULT), ErrorCode::kCorrupt,
                   place_of(path)));
  if (object.type == H5O_TYPE_GROUP) {
    if (!groups_seen_.insert(object.addr).second) {
      ++links_skipped_;
      return {};
    }
    const Handle inner = TRY(checked(H5Gopen2(group, name, H5P_DEFAULT), ErrorCode::kCorrupt, place_of(path)));
    return visit_group(inner.get(), path, depth + 1);
  }
  if (object.type != H5O_TYPE_DATASET) return {};
  const Handle dataset = TRY(checked(H5Dopen2(group, name, H5P_DEFAULT), ErrorCode::kCorrupt, place_of(path)));
  return visit_dataset(dataset.get(), path);
}

Status Scanner::visit_dataset(Id dataset, const std::string& path) {
  const std::string place = place_of(path), own = std::string(kOwnGroup) + "/";
  const bool is_tensor = !path.starts_with(own) || path.starts_with(own + "tensors/");
  Status added = is_tensor ? add_tensor(dataset, path, place) : add_own(dataset, path, place);
  if (added || added.error().code() != ErrorCode::kUnsupported) return added;
  listing_.not_tensors.emplace_back(path, added.error().message());
  return {};
}

Result<Dims> Scanner::shape_of(Id dataset) {
  const Handle space = TRY(checked(H5Dget_space(dataset), ErrorCode::kCorrupt, "shape"));
  const H5S_class_t kind = H5Sget_simple_extent_type(space.get());
  if (kind == H5S_SCALAR) return Dims();
  if (kind != H5S_SIMPLE) return unsupported("a dataset without a shape");
  const int rank = H5Sget_simple_extent_ndims(space.get());
  if (rank < 0 || rank > kMaxRank)
    return unsupported(count_of(rank, "dimension") + "; at most " + std::to_string(kMaxRank) + " are read");
  std::array<hsize_t, kMaxRank> extents{};
  TRY(checked_call(H5Sget_simple_extent_dims(space.get(), extents.data(), nullptr), ErrorCode::kCorrupt, "shape"));
  Dims shape;
  for (int d = 0; d < rank; ++d) {
    const auto extent = to_index(extents[d]);
    if (!extent) return corrupt("shape: an extent of 2^63 or more");
    shape.push_back(*extent);
  }
  return shape;
}

// Keras marks datasets of bfloat16 by an attribute (keras/src/saving/saving_lib.py), but not those of its legacy
// format. It has no other type that h5py stores so.
Result<bool> Scanner::is_bfloat16_of_keras(Id dataset, Id type, const std::string& place) const {
  if (!is_opaque_of_two_bytes(type)) return false;
  if (is_of_keras_) return true;
  return has_text_attribute(dataset, "dtype", "bfloat16", place);
}

Status Scanner::add_tensor(Id dataset, const std::string& path, const std::string& place) {
  Tensor tensor;
  tensor.name = TRY(read_text_attribute(dataset, kNameAttribute, kMaxTextAttribute, place));
  if (tensor.name.empty() && H5Aexists(dataset, kNameAttribute) <= 0) tensor.name = name_of_path(path);
  const Handle type = TRY(checked(H5Dget_type(dataset), ErrorCode::kCorrupt, place));
  const auto named = TRY(read_text_attribute(dataset, kDTypeAttribute, kMaxTextAttribute, place));
  const bool is_bfloat16 = TRY(is_bfloat16_of_keras(dataset, type.get(), place));
  auto stored = is_bfloat16 ? Result<StoredType>(StoredType{DType::kBFloat16, false}) : read_type(type.get(), named);
  if (!stored) {
    if (stored.error().code() == ErrorCode::kUnsupported) return std::move(stored).error();
    return std::move(stored).error().context(place);
  }
  tensor.dtype = stored->dtype;
  tensor.shape = TRY(shape_of(dataset));
  const auto elements = checked_volume(tensor.shape);
  if (!elements || !checked_mul(*elements, byte_size(tensor.dtype)))
    return corrupt(place + ": the size of " + to_string(tensor.shape) + " is 2^63 bytes or more");
  const std::string key = TRY(read_text_attribute(dataset, kPathAttribute, kMaxTextAttribute, place));
  TRY(charge(tensor.name));
  TRY(charge(key));
  tensor.path = {tensor.name};
  if (!key.empty()) tensor.path = TRY(parse_key_path(key, place + ": " + kPathAttribute));
  tensor.fragments = FragmentList(tensor.shape.rank());
  TRY(locate(dataset, tensor, stored->big_endian, place));
  return listing_.catalog.add(std::move(tensor));
}

// Reads the dataset of an object or a side file, which must be one run of bytes in this file.
Status Scanner::add_own(Id dataset, const std::string& path, const std::string& place) {
  const std::string objects = std::string(kOwnGroup) + "/objects/", files = std::string(kOwnGroup) + "/files/";
  const bool is_object = path.starts_with(objects);
  if (!is_object && !path.starts_with(files)) return {};
  Tensor bytes;
  bytes.dtype = DType::kUint8;
  bytes.shape = TRY(shape_of(dataset));
  if (bytes.shape.rank() != 1)
    return corrupt(place + ": expected bytes in one dimension, got " + to_string(bytes.shape));
  bytes.fragments = FragmentList(1);
  if (bytes.elements() > 0) TRY(locate_contiguous(dataset, bytes, false));
  const Extent extent = bytes.fragments.empty() ? Extent{} : bytes.fragments.extent(0);
  if (!is_object) {
    listing_.side_files.emplace_back(path.substr(files.size()), extent);
    return {};
  }
  Blob blob;
  blob.name = TRY(read_text_attribute(dataset, kNameAttribute, kMaxTextAttribute, place));
  blob.extent = extent;
  const std::string key = TRY(read_text_attribute(dataset, kPathAttribute, kMaxTextAttribute, place));
  blob.path = {blob.name};
  if (!key.empty()) blob.path = TRY(parse_key_path(key, place + ": " + kPathAttribute));
  listing_.catalog.blobs.push_back(std::move(blob));
  return {};
}

// ---- Extents

Status Scanner::locate(Id dataset, Tensor& tensor, bool big_endian, const std::string& place) {
  if (tensor.elements() == 0) return {};
  const Handle creation = TRY(checked(H5Dget_create_plist(dataset), ErrorCode::kCorrupt, place));
  switch (H5Pget_layout(creation.get())) {
    case H5D_CONTIGUOUS:
      if (H5Pget_external_count(creation.get()) > 0) return locate_external(creation.get(), tensor, big_endian);
      return locate_contiguous(dataset, tensor, big_endian);
    case H5D_CHUNKED:
      return locate_chunks(dataset, creation.get(), tensor, big_endian, place);
    case H5D_COMPACT:
      return unsupported("data inside the metadata (compact storage)");
    case H5D_VIRTUAL:
      return unsupported("a virtual dataset: a view of others");
    default:
      return unsupported("a storage layout that this version does not know");
  }
}

Status Scanner::locate_contiguous(Id dataset, Tensor& tensor, bool big_endian) {
  const haddr_t address = H5Dget_offset(dataset);
  if (address == HADDR_UNDEF) return unsupported("no data was ever written");
  const auto offset = to_index(address);
  if (!offset) return corrupt(path_ + ": " + tensor_text(tensor.name) + ": data at 2^63 or beyond");
  Fragment f;
  f.box = whole(tensor.shape);
  f.strides = row_major_strides(tensor.shape);
  f.extent = {0, *offset, tensor.bytes()};
  f.big_endian = big_endian;
  tensor.fragments.add(f);
  return {};
}

Result<std::uint32_t> Scanner::file_number(const std::string& stored) {
  auto& files = listing_.catalog.files;
  // Paths of a catalog are relative to its root.
  std::error_code ignored;
  const std::filesystem::path given(stored);
  const std::string name =
      given.is_absolute()
          ? given.lexically_relative(std::filesystem::absolute(listing_.catalog.root, ignored).lexically_normal())
                .string()
          : stored;
  for (std::size_t i = 1; i < files.size(); ++i)
    if (files[i].path == name) return static_cast<std::uint32_t>(i);
  const auto entry = TRY(entry_at(path_join(listing_.catalog.root, name)));
  files.push_back({name, entry && !entry->is_directory ? entry->size : -1});
  return static_cast<std::uint32_t>(files.size() - 1);
}

Status Scanner::locate_external(Id creation, Tensor& tensor, bool big_endian) {
  if (!external_too_) return unsupported("data in another file (add --allow external to read it)");
  if (H5Pget_external_count(creation) != 1) return unsupported("data in several other files");
  std::string name(kMaxLink, '\0');
  off_t offset = 0;
  hsize_t length = 0;
  TRY(checked_call(H5Pget_external(creation, 0, name.size() - 1, name.data(), &offset, &length), ErrorCode::kCorrupt,
                   path_));
  name.resize(::strnlen(name.data(), name.size()));
  if (name.empty() || offset < 0) return corrupt(path_ + ": " + tensor_text(tensor.name) + ": no external place");
  Fragment f;
  f.box = whole(tensor.shape);
  f.strides = row_major_strides(tensor.shape);
  f.extent = {TRY(file_number(name)), static_cast<Index>(offset), tensor.bytes()};
  f.big_endian = big_endian;
  tensor.fragments.add(f);
  return {};
}

Result<std::vector<ChunkFilter>> Scanner::filters_of(Id creation, Index element_bytes) {
  const int count = H5Pget_nfilters(creation);
  if (count < 0 || count > kMaxFilters) return unsupported(std::to_string(count) + " filters");
  std::vector<ChunkFilter> out;
  for (int i = 0; i < count; ++i) {
    unsigned flags = 0, config = 0, values[1] = {0};
    std::size_t n = 1;
    char name[2] = {};
    const H5Z_filter_t id =
        H5Pget_filter2(creation, static_cast<unsigned>(i), &flags, &n, values, sizeof name, name, &config);
    if (id == H5Z_FILTER_SHUFFLE) {
      // The element size that the writer recorded, or that of the type if it is not recorded yet.
      const Index unit = n >= 1 && values[0] > 0 ? static_cast<Index>(values[0]) : element_bytes;
      out.push_back({ChunkFilter::Kind::kShuffle, unit});
    } else if (id == H5Z_FILTER_DEFLATE) {
      out.push_back({ChunkFilter::Kind::kDeflate});
    } else if (id == H5Z_FILTER_FLETCHER32) {
      out.push_back({ChunkFilter::Kind::kFletcher32});
    } else if (id == kZstdFilter) {
      out.push_back({ChunkFilter::Kind::kZstd});
    } else {
      return unsupported("filter " + std::to_string(id) +
                         "; supported: shuffle, deflate (gzip), fletcher32, zstd (32015)");
    }
  }
  return out;
}

Status Scanner::locate_chunks(Id dataset, Id creation, Tensor& tensor, bool big_endian, const std::string& place) {
  const int rank = tensor.shape.rank();
  const Index element_bytes = byte_size(tensor.dtype);
  std::array<hsize_t, kMaxRank> extents{};
  if (H5Pget_chunk(creation, rank, extents.data()) != rank)
    return corrupt(place + ": expected chunks of " + count_of(rank, "dimension"));
  Dims shape, grid;
  Index count = 1;
  for (int d = 0; d < rank; ++d) {
    const auto extent = to_index(extents[d]);
    if (!extent || *extent < 1) return corrupt(place + ": chunk shape: an extent out of range");
    shape.push_back(*extent);
    grid.push_back(ceil_div(tensor.shape[d], *extent));
    const auto product = checked_mul(count, grid[d]);
    if (!product || *product > kMaxChunks)
      return unsupported("more than " + with_commas(kMaxChunks) + " chunks; h5repack makes them larger");
    count = *product;
  }
  const auto elements = checked_volume(shape);
  const auto bytes = elements ? checked_mul(*elements, element_bytes) : std::nullopt;
  if (!bytes || *bytes > kMaxChunkBytes)
    return unsupported("chunks of more than " + human_bytes(kMaxChunkBytes) + "; h5repack makes them smaller");
  const auto filters = TRY(filters_of(creation, element_bytes));

  std::vector<std::pair<unsigned, std::shared_ptr<const ChunkEncoding>>> encodings;  // by filter mask
  const auto encoding_of = [&](unsigned mask) -> std::shared_ptr<const ChunkEncoding> {
    mask &= (1u << filters.size()) - 1;
    for (const auto& [known, encoding] : encodings)
      if (known == mask) return encoding;
    auto encoding = std::make_shared<ChunkEncoding>();
    encoding->decoded_bytes = *bytes;
    for (std::size_t i = 0; i < filters.size(); ++i)
      if ((mask >> i & 1) == 0) encoding->filters.push_back(filters[i]);
    if (encoding->filters.empty()) encoding = nullptr;
    return encodings.emplace_back(mask, encoding).second;
  };
  const Index longest = *bytes + *bytes / 8 + 4096;  // stored chunks; incompressible data grow a little
  tensor.fragments.reserve(count);
  for (Index k = 0; k < count; ++k) {
    Fragment f;
    f.box = {Dims::filled(rank, 0), shape};
    f.strides = row_major_strides(shape);
    std::array<hsize_t, kMaxRank> at{};
    Index rest = k;
    for (int d = rank - 1; d >= 0; --d) {
      f.box.origin[d] = rest % grid[d] * shape[d];
      f.box.shape[d] = std::min(shape[d], tensor.shape[d] - f.box.origin[d]);
      at[d] = static_cast<hsize_t>(f.box.origin[d]);
      rest /= grid[d];
    }
    unsigned mask = 0;
    haddr_t address = HADDR_UNDEF;
    hsize_t size = 0;
    const std::string where = place + " " + to_string(f.box);
    TRY(checked_call(H5Dget_chunk_info_by_coord(dataset, at.data(), &mask, &address, &size), ErrorCode::kCorrupt,
                     where));
    if (address == HADDR_UNDEF) return unsupported("chunks that were never written, the first at " + to_string(f.box));
    const auto offset = to_index(address), length = to_index(size);
    f.encoding = encoding_of(mask);
    if (!offset || !length || *length > longest || (!f.encoding && *length != *bytes))
      return corrupt(where + ": chunk: expected " +
                     (f.encoding ? "at most " + std::to_string(longest) : std::to_string(*bytes)) +
                     " stored bytes, got " + std::to_string(size));
    f.extent = {0, *offset, *length};
    f.big_endian = big_endian;
    tensor.fragments.add(f);
  }
  // Slabs should end between chunks, so that none is decoded twice.
  const Index row_bytes = tensor.bytes() / tensor.shape[0];
  if (row_bytes * shape[0] <= kMaxChunkBytes / 8) tensor.row_group = shape[0];
  return {};
}

// Handles a crash. One after a failed allocation says nothing about the file, so the child exits with kNoMemory. Any
// other ends the process when the instruction is repeated.
void end_where_memory_is_out(int) {
  if (is_out_of_memory()) ::_exit(kNoMemory);
}

void handle_crashes() {
  alignas(16) static std::array<std::byte, 32 << 10> stack;  // the normal stack may be full
  const stack_t here{.ss_sp = stack.data(), .ss_flags = 0, .ss_size = stack.size()};
  ::sigaltstack(&here, nullptr);
  struct sigaction action = {};
  action.sa_handler = end_where_memory_is_out;
  action.sa_flags = SA_ONSTACK | SA_RESETHAND;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) ::sigaction(signal, &action, nullptr);
}

}  // namespace

Result<Listing> scan(const std::string& path, bool external_too) { return Scanner(path, external_too).run(); }

Status scan_in_child(const std::string& path, bool external_too) {
  const LibraryLock lock;  // no other thread is inside the library during the fork
  const pid_t parent = ::getpid(), child = ::fork();
  if (child < 0) return io_error(path + ": cannot start a process to read it");
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(0);  // the parent was already killed
    for (const int signal : {SIGALRM, SIGPROF, SIGINT, SIGTERM}) std::signal(signal, SIG_DFL);
    handle_crashes();
    // Other threads (Python's) may hold locks during the fork, which nobody releases here. The library's is ours. The C
    // library makes its allocator, stdio and loader usable again, and nothing else below takes a lock: Scanner only
    // allocates and calls libhdf5 (tests/formats/hdf5: IsTriedInAChildWhileThreadsHoldLocks). Under another allocator
    // the child could wait for good; the alarm then ends it.
    // Damaged metadata keep libhdf5 busy, and a child that waits has met a slow disk.
    const itimerval busy = {{}, {kScanSeconds, 0}};
    ::setitimer(ITIMER_PROF, &busy, nullptr);
    ::alarm(kWaitSeconds);
    try {
      (void)scan(path, external_too);
    } catch (const std::exception&) {  // the parent reports it
    }
    ::_exit(0);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0)
    if (errno != EINTR) return io_error(path + ": cannot wait for the process that reads it");
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNoMemory)
    return io_error(path + ": out of memory: libhdf5 crashed while it read the metadata");
  if (!WIFSIGNALED(status)) return {};
  if (WTERMSIG(status) == SIGALRM)
    return io_error(path + ": its metadata was not read within " + std::to_string(kWaitSeconds) + " seconds");
  if (WTERMSIG(status) == SIGPROF)
    return corrupt(path + ": the metadata is damaged: libhdf5 does not finish reading it");
  return corrupt(path + ": the metadata is damaged: libhdf5 crashed while it read it (signal " +
                 std::to_string(WTERMSIG(status)) + ")");
}

}  // namespace reshard::hdf5
