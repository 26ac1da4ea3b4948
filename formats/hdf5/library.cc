// SPDX-License-Identifier: Apache-2.0
#include "formats/hdf5/library.h"

#include <hdf5.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>
#include <new>

#include "lib/base/file.h"
#include "lib/base/text.h"

namespace reshard::hdf5 {
namespace {

// Not a std::recursive_mutex: it identifies its owner by a thread number that changes in a forked process.
std::mutex library_mutex;
thread_local int times_held = 0;

// Returns the description of the error at the bottom of the library's error stack.
herr_t keep_innermost(unsigned n, const H5E_error2_t* error, void* out) {
  if (n == 0 && error->desc) *static_cast<std::string*>(out) = error->desc;
  return 0;
}

Error library_error(ErrorCode code, std::string_view what) {
  const bool is_memory = is_out_of_memory();
  std::string text;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_innermost, &text);
  text = text.empty() ? "no reason" : printable(text);
  return {is_memory ? ErrorCode::kIo : code,
          std::string(what) + (is_memory ? ": out of memory" : "") + ": libhdf5 says '" + text + "'"};
}

}  // namespace

LibraryLock::~LibraryLock() {
  if (--times_held == 0) library_mutex.unlock();
}

LibraryLock::LibraryLock() {
  static const bool kReady = [] {
    // No clean-up at exit: handles close themselves, and a killed process has no open files of ours.
    errno = 0;
    H5dont_atexit();
    if (H5open() < 0 || is_out_of_memory()) throw std::bad_alloc();  // H5open() fails only if memory runs out
    H5PLset_loading_state(0);
    return true;
  }();
  (void)kReady;
  if (times_held++ == 0) {
    library_mutex.lock();
    errno = 0;
  }
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // needed in every thread
}

bool is_out_of_memory() { return errno == ENOMEM; }

Handle::~Handle() {
  if (id_ < 0) return;
  const LibraryLock lock;
  H5Idec_ref(id_);
}

Result<Handle> checked(Id id, ErrorCode code, std::string_view what) {
  Handle handle(id);
  if (handle.ok() && !is_out_of_memory()) return handle;
  return library_error(code, what);
}

Status checked_call(int result, ErrorCode code, std::string_view what) {
  if (result >= 0 && !is_out_of_memory()) return {};
  return library_error(code, what);
}

Result<Handle> DatasetMaker::file_properties() {
  Handle list = TRY(checked(H5Pcreate(H5P_FILE_CREATE), ErrorCode::kInternal, "HDF5 file"));
  TRY(checked_call(H5Pset_obj_track_times(list.get(), 0), ErrorCode::kInternal, "HDF5 file"));
  return list;
}

Result<Handle> DatasetMaker::properties() {
  Handle list = TRY(checked(H5Pcreate(H5P_DATASET_CREATE), ErrorCode::kInternal, "HDF5 dataset"));
  TRY(checked_call(H5Pset_obj_track_times(list.get(), 0), ErrorCode::kInternal, "HDF5 dataset"));
  return list;
}

Status DatasetMaker::make_groups(Id file, const std::string& path) {
  for (std::size_t slash = path.find('/'); slash != std::string::npos; slash = path.find('/', slash + 1)) {
    const std::string group = path.substr(0, slash);
    if (!groups_.insert(group).second) continue;
    const std::string what = "group '" + printable(group) + "'";
    const Handle links = TRY(checked(H5Pcreate(H5P_LINK_CREATE), ErrorCode::kInternal, what));
    H5Pset_char_encoding(links.get(), H5T_CSET_UTF8);
    const Handle creation = TRY(checked(H5Pcreate(H5P_GROUP_CREATE), ErrorCode::kInternal, what));
    H5Pset_obj_track_times(creation.get(), 0);
    TRY(checked(H5Gcreate2(file, group.c_str(), links.get(), creation.get(), H5P_DEFAULT), ErrorCode::kUnsupported,
                what));
  }
  return {};
}

Result<Handle> DatasetMaker::make(Id file, const std::string& path, Id type, const Dims& shape, Id properties) {
  TRY(make_groups(file, path));
  const std::string what = "dataset '" + printable(path) + "'";
  std::array<hsize_t, kMaxRank> extents{};
  std::transform(shape.begin(), shape.end(), extents.begin(), [](Index n) { return static_cast<hsize_t>(n); });
  const Handle space =
      TRY(checked(shape.rank() == 0 ? H5Screate(H5S_SCALAR) : H5Screate_simple(shape.rank(), extents.data(), nullptr),
                  ErrorCode::kInternal, what));
  const Handle links = TRY(checked(H5Pcreate(H5P_LINK_CREATE), ErrorCode::kInternal, what));
  H5Pset_char_encoding(links.get(), H5T_CSET_UTF8);
  return checked(H5Dcreate2(file, path.c_str(), type, space.get(), links.get(), properties, H5P_DEFAULT),
                 ErrorCode::kUnsupported, what);
}

std::string library_version() {
  unsigned major = 0, minor = 0, release = 0;
  H5get_libversion(&major, &minor, &release);
  return "HDF5 " + std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

bool is_hdf5_file(const PathSnapshot& place) {
  constexpr std::array<unsigned char, 8> kSignature = {0x89, 'H', 'D', 'F', '\r', '\n', 0x1a, '\n'};
  const std::string_view signature(reinterpret_cast<const char*>(kSignature.data()), kSignature.size());
  const std::string_view head = place.head();
  const std::size_t behind_user_block = 512;  // the smallest block, also used by MATLAB; scan() distinguishes them
  return head.starts_with(signature) ||
         (head.size() > behind_user_block && head.substr(behind_user_block).starts_with(signature));
}

Status write_text_attribute(Id object, const char* name, std::string_view text) {
  const std::string what = std::string("attribute ") + name;
  const Handle type = TRY(checked(H5Tcopy(H5T_C_S1), ErrorCode::kInternal, what));
  const std::size_t size = text.empty() ? 1 : text.size();
  const std::string padded = text.empty() ? std::string(1, '\0') : std::string(text);
  H5Tset_size(type.get(), size);
  H5Tset_strpad(type.get(), H5T_STR_NULLPAD);
  H5Tset_cset(type.get(), H5T_CSET_UTF8);
  const Handle space = TRY(checked(H5Screate(H5S_SCALAR), ErrorCode::kInternal, what));
  const Handle attribute = TRY(checked(H5Acreate2(object, name, type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT),
                                       ErrorCode::kUnsupported, what));
  return checked_call(H5Awrite(attribute.get(), type.get(), padded.data()), ErrorCode::kInternal, what);
}

Result<std::string> read_text_attribute(Id object, const char* name, std::size_t limit, const std::string& place) {
  const std::string what = place + ": attribute " + name;
  const htri_t exists = H5Aexists(object, name);
  TRY(checked_call(exists, ErrorCode::kCorrupt, what));
  if (exists == 0) return std::string();
  const Handle attribute = TRY(checked(H5Aopen(object, name, H5P_DEFAULT), ErrorCode::kCorrupt, what));
  const Handle type = TRY(checked(H5Aget_type(attribute.get()), ErrorCode::kCorrupt, what));
  const Handle space = TRY(checked(H5Aget_space(attribute.get()), ErrorCode::kCorrupt, what));
  const bool is_text = H5Tget_class(type.get()) == H5T_STRING && H5Tis_variable_str(type.get()) == 0 &&
                       H5Sget_simple_extent_npoints(space.get()) == 1;
  const std::size_t size = H5Tget_size(type.get());
  if (!is_text || size == 0 || size > limit) return corrupt(what + ": expected one text of at most " + bytes_of(limit));
  std::string text(size, '\0');
  TRY(checked_call(H5Aread(attribute.get(), type.get(), text.data()), ErrorCode::kCorrupt, what));
  text.resize(std::min(text.size(), text.find_last_not_of('\0') + 1));
  return text;
}

Result<bool> has_text_attribute(Id object, const char* name, std::string_view text, const std::string& place) {
  const std::string what = place + ": attribute " + name;
  const htri_t exists = H5Aexists(object, name);
  TRY(checked_call(exists, ErrorCode::kCorrupt, what));
  if (exists == 0) return false;
  const Handle attribute = TRY(checked(H5Aopen(object, name, H5P_DEFAULT), ErrorCode::kCorrupt, what));
  const Handle type = TRY(checked(H5Aget_type(attribute.get()), ErrorCode::kCorrupt, what));
  const Handle space = TRY(checked(H5Aget_space(attribute.get()), ErrorCode::kCorrupt, what));
  if (H5Tget_class(type.get()) != H5T_STRING || H5Sget_simple_extent_npoints(space.get()) != 1) return false;
  if (H5Tis_variable_str(type.get()) == 0) {
    constexpr std::size_t kMost = 1000;  // bytes; a longer text is another
    if (H5Tget_size(type.get()) > kMost) return false;
    return TRY(read_text_attribute(object, name, kMost, place)) == text;
  }
  char* stored = nullptr;
  TRY(checked_call(H5Aread(attribute.get(), type.get(), &stored), ErrorCode::kCorrupt, what));
  const bool is_text = stored != nullptr && stored == text;
  H5Dvlen_reclaim(type.get(), space.get(), H5P_DEFAULT, &stored);
  return is_text;
}

}  // namespace reshard::hdf5
