// SPDX-License-Identifier: Apache-2.0
#include "formats/hdf5/memory_driver.h"

#include <hdf5.h>

#include <algorithm>
#include <cstring>

namespace reshard::hdf5 {

void MemoryImage::write(Index offset, Bytes bytes) {
  if (bytes.empty()) return;
  const Index finish = offset + std::ssize(bytes);
  // Merge the new bytes with all runs that they overlap or touch.
  auto first = runs_.upper_bound(offset);
  if (first != runs_.begin()) {
    const auto before = std::prev(first);
    if (before->first + std::ssize(before->second) >= offset) first = before;
  }
  if (first == runs_.end() || first->first > offset) first = runs_.emplace_hint(first, offset, std::string());
  std::string& run = first->second;
  const std::size_t at = offset - first->first;
  auto next = std::next(first);
  if (run.size() < at + bytes.size()) run.resize(at + bytes.size());
  std::memcpy(run.data() + at, bytes.data(), bytes.size());
  while (next != runs_.end() && next->first <= finish) {
    const Index next_end = next->first + std::ssize(next->second);
    if (next_end > finish) run.append(next->second, static_cast<std::size_t>(finish - next->first));
    next = runs_.erase(next);
  }
}

void MemoryImage::read(Index offset, MutableBytes out) const {
  std::fill(out.begin(), out.end(), std::byte{0});
  const Index finish = offset + std::ssize(out);
  auto it = runs_.upper_bound(offset);
  if (it != runs_.begin()) --it;
  for (; it != runs_.end() && it->first < finish; ++it) {
    const Index begin = std::max(offset, it->first);
    const Index stop = std::min(finish, it->first + std::ssize(it->second));
    if (begin >= stop) continue;
    std::memcpy(out.data() + (begin - offset), it->second.data() + (begin - it->first), stop - begin);
  }
}

Status MemoryImage::each_run(const std::function<Status(Index offset, Bytes bytes)>& visit) const {
  for (const auto& [offset, run] : runs_) TRY(visit(offset, reshard::as_bytes(run)));
  return {};
}

namespace {

// The driver's data in the access property list.
struct ImageInfo {
  MemoryImage* image = nullptr;
};

// The open file that the library passes to every call. Its own part must come first.
struct OpenImage {
  H5FD_t base{};
  MemoryImage* image = nullptr;
};

MemoryImage& image_of(const H5FD_t* file) { return *reinterpret_cast<const OpenImage*>(file)->image; }

H5FD_t* open_image(const char*, unsigned, hid_t access, haddr_t) {
  const void* info = H5Pget_driver_info(access);
  if (!info) return nullptr;
  auto* open = new OpenImage;
  open->image = static_cast<const ImageInfo*>(info)->image;
  return &open->base;
}

herr_t close_image(H5FD_t* file) {
  delete reinterpret_cast<OpenImage*>(file);
  return 0;
}

herr_t query(const H5FD_t*, unsigned long* flags) {
  *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_AGGREGATE_SMALLDATA;
  return 0;
}

haddr_t get_end(const H5FD_t* file, H5FD_mem_t) { return static_cast<haddr_t>(image_of(file).end); }

herr_t set_end(H5FD_t* file, H5FD_mem_t, haddr_t end) {
  image_of(file).end = end;
  return 0;
}

herr_t read_image(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t offset, std::size_t size, void* out) {
  image_of(file).read(offset, MutableBytes(static_cast<std::byte*>(out), size));
  return 0;
}

herr_t write_image(H5FD_t* file, H5FD_mem_t type, hid_t, haddr_t offset, std::size_t size, const void* bytes) {
  MemoryImage& image = image_of(file);
  if (type == H5FD_MEM_DRAW && image.passes_payloads)
    image.payload_at = offset;
  else
    image.write(offset, Bytes(static_cast<const std::byte*>(bytes), size));
  return 0;
}

H5FD_class_t driver_class() {
  H5FD_class_t c{};
  c.name = "reshard_memory";
  c.maxaddr = static_cast<haddr_t>(INT64_MAX);
  c.fc_degree = H5F_CLOSE_STRONG;
  c.fapl_size = sizeof(ImageInfo);
  c.open = open_image;
  c.close = close_image;
  c.query = query;
  c.get_eoa = get_end;
  c.set_eoa = set_end;
  c.get_eof = get_end;
  c.read = read_image;
  c.write = write_image;
  std::fill(std::begin(c.fl_map), std::end(c.fl_map), H5FD_MEM_DEFAULT);
  return c;
}

}  // namespace

std::int64_t memory_file_access(MemoryImage& image) {
  static const H5FD_class_t kClass = driver_class();
  static const hid_t kDriver = H5FDregister(&kClass);
  const hid_t list = H5Pcreate(H5P_FILE_ACCESS);
  const ImageInfo info{&image};
  if (list < 0 || kDriver < 0 || H5Pset_driver(list, kDriver, &info) < 0) return -1;
  return list;
}

}  // namespace reshard::hdf5
