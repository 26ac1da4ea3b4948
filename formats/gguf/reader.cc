// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <set>

#include "formats/gguf/gguf.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard::gguf {
namespace {

class GgufReader : public Reader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);

  Status locate(const std::vector<std::size_t>&, int, const std::string&) override { return {}; }
  Result<std::string> blob_bytes(const Blob& blob) override { return internal_error("no object '" + blob.name + "'"); }
  std::string describe(const Blob&) override { return {}; }

 private:
  Result<std::optional<Json>> made_config() override { return config_; }

  Result<std::vector<std::string>> find_files(const PathSnapshot& place) const;
  Status read_file(const std::string& name);
  Status add(const TensorInfo& info, std::uint32_t file, bool big_endian);
  void set_model_dtypes();
  void describe_header(const Header& first);

  std::map<std::uint32_t, Index> types_;  // tensors by type
  Index parameters_ = 0;                  // elements before they were quantized
  std::optional<Header> first_;           // of the first file, which has all pairs
  std::optional<Json> config_;
};

// Returns the names of the model's files, in their order.
Result<std::vector<std::string>> GgufReader::find_files(const PathSnapshot& place) const {
  const PathSnapshot& directory = *TRY(place.directory());
  std::map<std::string, std::vector<std::string>> models;  // files by model
  std::string wanted;
  for (const DirectoryEntry& e : directory.entries()) {
    if (e.is_directory || !(e.name.ends_with(kEnding) || (place.is_file() && e.name == place.name()))) continue;
    const SplitName split = parse_split_name(e.name);
    const std::string model = split.stem + "\n" + std::to_string(split.count);
    models[model].push_back(e.name);
    if (place.is_file() && e.name == place.name()) wanted = model;
  }
  if (!place.is_file() && models.size() > 1) {
    std::vector<std::string> first;
    for (const auto& [model, files] : models) first.push_back(printable(files.front()));
    return unsupported(place.path() + ": a directory of several models; name one of them: " + some_of(first));
  }
  if (place.is_file() && wanted.empty()) return std::vector{place.name()};  // a link that is not listed
  std::vector<std::string> files = place.is_file() ? models[wanted] : models.begin()->second;
  const Index count = parse_split_name(files.front()).count;
  if (std::ssize(files) == count) return files;  // sorted by name
  return io_error(directory.path() + ": expected " + count_of(count, "file") + " like " + printable(files.front()) +
                  ", got " + std::to_string(files.size()));
}

Status GgufReader::add(const TensorInfo& info, std::uint32_t file, bool big_endian) {
  Tensor tensor;
  tensor.name = info.name;
  if (info.type->is_quantized()) tensor.name += ":" + std::string(info.type->name);
  tensor.dtype = info.type->dtype;
  tensor.shape = info.shape;
  parameters_ = checked_add(parameters_, info.elements).value_or(INT64_MAX);
  tensor.fragments = FragmentList(info.shape.rank());
  Fragment fragment = dense_fragment(whole(info.shape), {file, info.offset, info.bytes});
  fragment.big_endian = big_endian && !info.type->is_quantized() && byte_size(info.type->dtype) > 1;
  tensor.fragments.add(fragment);
  ++types_[info.type->number];
  return catalog_.add(std::move(tensor)).context(catalog_.file_path(file));
}

Status GgufReader::read_file(const std::string& name) {
  const auto number = static_cast<std::uint32_t>(catalog_.files.size());
  const auto file = TRY(files_.open(path_join(catalog_.root, name)));
  const Index size = TRY(file->size());
  catalog_.files.push_back({name, size});
  Header header = TRY(read_header(*file));
  for (const TensorInfo& info : header.tensors) TRY(add(info, number, header.big_endian));
  header.tensors.clear();
  if (!first_) first_ = std::move(header);
  return {};
}

// Sets the dtypes that vectors, such as norms, have in the model: llama.cpp's converter always stores them as float32.
// If all matrices have one dtype, it is that.
void GgufReader::set_model_dtypes() {
  std::set<DType> of_matrices;
  for (const Tensor& t : catalog_.tensors())
    if (t.shape.rank() > 1 && is_floating(t.dtype) && t.dtype != DType::kFloat32) of_matrices.insert(t.dtype);
  if (of_matrices.size() != 1) return;
  for (Tensor& t : catalog_.own_tensors())
    if (t.shape.rank() <= 1 && t.dtype == DType::kFloat32) t.model_dtype = *of_matrices.begin();
}

void GgufReader::describe_header(const Header& first) {
  const auto add_text = [&](std::string_view title, std::string_view key) {
    const Json* const value = first.find(key);
    if (value && value->is_string()) catalog_.attributes.emplace_back(title, printable(*value->as_string()));
  };
  catalog_.attributes.emplace_back("format", "GGUF version " + std::to_string(first.version) + ", " +
                                                 count_of(std::ssize(catalog_.files), "file") +
                                                 (first.big_endian ? ", big-endian" : ""));
  add_text("architecture", "general.architecture");
  add_text("name", "general.name");
  std::vector<std::string> types;
  for (const auto& [number, count] : types_)
    types.push_back(std::string(find_type(number)->name) + " " + count_of(count, "tensor"));
  catalog_.attributes.emplace_back("types", join(types, ", "));
  catalog_.attributes.emplace_back("weights", count_of(parameters_, "parameter") + ": " + join(types, ", "));
}

Status GgufReader::open(const PathSnapshot& place, const OpenOptions& options) {
  catalog_.root = TRY(place.directory())->path();
  for (const std::string& name : TRY(find_files(place))) TRY(read_file(name));
  catalog_.has_other_bytes = true;  // the header with the tokenizer
  catalog_.sort_by_name();
  set_model_dtypes();
  describe_header(*first_);
  MadeConfig made = make_config(*first_, catalog_);
  config_ = std::move(made.config);
  catalog_.attributes.emplace_back("config", config_ ? "made from the header" : "none: " + made.why_not);
  return options.validated ? validate(catalog_, options.files_too) : Status();
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<GgufReader>(place, options);
}

}  // namespace reshard::gguf
