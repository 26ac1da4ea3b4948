#include "tests/support/checkpoints.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>

#include "formats/dcp/dcp.h"
#include "formats/encoding/torch_archive.h"
#include "formats/open.h"
#include "lib/device/copy.h"
#include "lib/device/crc32.h"
#include "lib/engine/run.h"
#include "tests/support/must.h"
#include "tests/support/temp_dir.h"

namespace reshard {
namespace {

namespace fs = std::filesystem;

class MemorySource : public TensorSource {
 public:
  explicit MemorySource(const TensorValues& values) : values_(values) {
    for (const auto& [name, value] : values) {
      Tensor t;
      t.name = name;
      t.dtype = value.dtype;
      t.shape = value.shape;
      t.fragments = FragmentList(value.shape.rank());
      Fragment f;
      f.box = whole(value.shape);
      f.strides = row_major_strides(value.shape);
      t.fragments.add(f);
      must(catalog_.add(std::move(t)));
    }
  }
  const Catalog& catalog() const override { return catalog_; }
  std::vector<StoredPiece> pieces(std::size_t, const Box& box) override { return {{box}}; }
  Status read_pieces(std::size_t tensor, const Box& box, const PieceFilter&, MutableBytes out, MutableBytes) override {
    const TensorValue& v = values_.at(catalog_.tensors()[tensor].name);
    const Dims strides = row_major_strides(v.shape);
    Index start = 0;
    for (int d = 0; d < box.rank(); ++d) start += box.begin(d) * strides[d];
    const auto bytes = as_bytes(v.bytes);
    copy_box(box.shape, byte_size(v.dtype), bytes.data() + start * byte_size(v.dtype), strides, out.data(),
             row_major_strides(box.shape));
    return {};
  }
  Status finish(MutableBytes, Transport*) override { return {}; }
  Index columns(std::size_t) const override { return 1; }

 private:
  const TensorValues& values_;
  Catalog catalog_;
};

}  // namespace

Result<TensorValues> load_values(Reader& reader) {
  Catalog& catalog = reader.catalog();
  std::vector<std::size_t> all(catalog.tensors().size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  TRY(reader.locate(all, 1, fs::temp_directory_path()));
  FileSource source(catalog, reader.files());
  std::vector<std::byte> scratch(std::size_t{1} << 20);
  TensorValues out;
  for (const std::size_t i : all) {
    const Tensor& t = catalog.tensors()[i];
    TensorValue value{t.dtype, t.shape, std::string(static_cast<std::size_t>(t.bytes()), '\0')};
    const MutableBytes bytes(reinterpret_cast<std::byte*>(value.bytes.data()), value.bytes.size());
    TRY(source.read(i, whole(t.shape), bytes, scratch));
    out.emplace(t.name, std::move(value));
  }
  TRY(source.finish(scratch, nullptr));
  return out;
}

TensorValues load_checkpoint(const std::string& path) { return must(load_values(*must(open_checkpoint(path)).reader)); }

void write_target(const TensorValues& tensors, Target& target, const std::string& path) {
  MemorySource source(tensors);
  const Plan plan = must(make_plan(source.catalog(), target.catalog()));
  auto output = must(Output::create({path}, target));
  RunOptions options;
  options.threads = 1;
  options.memory = Index{1} << 30;
  must(copy_tensors(plan, source, target.catalog(), *output, options));
  must(output->commit());
}

void write_dcp(const TensorValues& tensors, const std::string& path, const Mesh& mesh) {
  LayoutRequest request;
  request.mesh = mesh;
  for (const auto& [name, value] : tensors) {
    TargetTensor t{name, value.dtype, value.shape, {}, {}};
    if (value.shape.rank() > 0) t.placement = Placement{{{{"dp_shard"}, 0}}};
    request.tensors.push_back(std::move(t));
  }
  write_target(tensors, *must(kDcpFormat.lay_out(std::move(request))), path);
}

std::string dcp_item(DType dtype, const Dims& shape, Index offset, std::string_view payload) {
  torch_archive::Item item(dtype, shape, offset);
  item.set_crc(crc32(0, as_bytes(payload)));
  return item.header() + std::string(payload) + item.trailer();
}

std::string sample(const std::string& name) { return std::string(RESHARD_SOURCE_DIR) + "/samples/checkpoints/" + name; }

std::string sample_checkpoint(const std::string& name) { return sample(name) + "/checkpoint"; }

void copy_sample(const std::string& name, const std::string& into) {
  fs::create_directories(into);
  fs::copy(sample(name) + "/checkpoint", into + "/checkpoint", fs::copy_options::recursive);
  fs::copy(sample(name) + "/config.json", into + "/config.json");
}

std::string test_data(const std::string& name) { return RESHARD_SOURCE_DIR "/tests/data/" + name; }

Result<std::unique_ptr<Reader>> open_with(const Format& format, const std::string& path, const OpenOptions& options) {
  return format.open(TRY(PathSnapshot::look(path)), options);
}

bool recognises(const Format& format, const std::string& path) {
  if (!format.recognises) return false;
  const auto found = format.recognises(*PathSnapshot::look(path));
  EXPECT_TRUE(found.has_value()) << found.error().message();
  return found.has_value() && *found;
}

std::string error_of_opening(const std::string& path) {
  const auto open = open_checkpoint(path);
  if (open) return "";
  return shortened(open.error().message(), path);
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in) << path << ": cannot be read";
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

void write_file(const std::string& path, std::string_view bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  EXPECT_TRUE(out.flush()) << path << ": cannot be written";
}

std::map<std::string, std::string> all_files(const std::string& directory) {
  std::map<std::string, std::string> out;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    if (entry.is_regular_file()) out[fs::relative(entry.path(), directory)] = read_file(entry.path());
  return out;
}

std::map<std::string, std::string> files_at(const std::string& path) {
  if (fs::is_regular_file(path)) return {{"", read_file(path)}};
  return all_files(path);
}

}  // namespace reshard
