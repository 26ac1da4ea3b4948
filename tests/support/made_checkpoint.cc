#include "tests/support/made_checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <numeric>

#include "lib/source/computed_source.h"

namespace reshard {

MadeCheckpoint::MadeCheckpoint(const std::string& root, const std::string& name) {
  catalog_.root = root;
  catalog_.files.push_back({name, 0});
}

void MadeCheckpoint::add(const std::string& name, const Dims& shape, const std::vector<float>& values, Index cut) {
  ASSERT_EQ(std::ssize(values), volume(shape)) << name;
  Tensor t;
  t.name = name;
  t.shape = shape;
  t.fragments = FragmentList(shape.rank());
  const Index rows = shape.rank() == 0 ? 1 : shape[0], row = volume(shape) / std::max<Index>(1, rows) * 4;
  for (const auto& [begin, end] : {std::pair(Index{0}, cut), {cut, rows}}) {
    if (begin == end) continue;
    Box box = whole(shape);
    if (shape.rank() > 0) {
      box.origin[0] = begin;
      box.shape[0] = end - begin;
    }
    t.fragments.add(box, {0, std::ssize(bytes_) + begin * row, (end - begin) * row});
  }
  ASSERT_TRUE(catalog_.add(std::move(t)));
  bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

void MadeCheckpoint::add(const std::string& name, DType dtype, const Dims& shape, std::string_view elements) {
  Tensor t;
  t.name = name;
  t.dtype = dtype;
  t.shape = shape;
  ASSERT_EQ(std::ssize(elements), t.bytes()) << name;
  t.fragments = FragmentList(shape.rank());
  t.fragments.add(whole(shape), {0, std::ssize(bytes_), t.bytes()});
  ASSERT_TRUE(catalog_.add(std::move(t)));
  bytes_ += elements;
}

void MadeCheckpoint::add_object(const std::string& name, const std::string& value) {
  catalog_.blobs.push_back({name, {0, 0, std::ssize(value)}, {name}});
  objects_[name] = value;
}

void MadeCheckpoint::write() {
  std::ofstream(catalog_.file_path(0), std::ios::binary) << bytes_;
  catalog_.files[0].size = std::ssize(bytes_);
}

std::vector<float> MadeCheckpoint::read(const std::string& tensor) { return floats_of(catalog_, files_, tensor); }

std::string bytes_of(TensorSource& source, const std::string& tensor) {
  const auto number = source.catalog().find(tensor);
  if (!number) {
    ADD_FAILURE() << tensor << " is not there";
    return {};
  }
  const Tensor& t = source.catalog().tensors()[*number];
  std::string out(static_cast<std::size_t>(t.bytes()), '\0');
  std::vector<std::byte> scratch(std::size_t{1} << 20);
  const Status read =
      source.read(*number, whole(t.shape), {reinterpret_cast<std::byte*>(out.data()), out.size()}, scratch);
  EXPECT_TRUE(read) << (read ? "" : read.error().message());
  return out;
}

std::vector<float> floats_of(TensorSource& source, const std::string& tensor) {
  const auto number = source.catalog().find(tensor);
  if (!number) {
    ADD_FAILURE() << tensor << " is not there";
    return {};
  }
  std::vector<std::byte> scratch(std::size_t{1} << 20);
  auto out = read_floats(source, *number, whole(source.catalog().tensors()[*number].shape), scratch);
  EXPECT_TRUE(out) << (out ? "" : out.error().message());
  return out ? *std::move(out) : std::vector<float>();
}

std::vector<float> floats_of(const Catalog& catalog, FilePool& files, const std::string& tensor) {
  FileSource source(catalog, files);
  const auto number = catalog.find(tensor);
  EXPECT_TRUE(!number || check_cover(catalog.tensors()[*number])) << tensor;
  std::vector<float> out = floats_of(source, tensor);
  std::vector<std::byte> scratch(std::size_t{1} << 20);
  EXPECT_TRUE(source.finish(scratch, nullptr));
  return out;
}

std::vector<float> counted(Index n, float from) {
  std::vector<float> out(static_cast<std::size_t>(n));
  std::iota(out.begin(), out.end(), from);
  return out;
}

}  // namespace reshard
