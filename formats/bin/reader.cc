// SPDX-License-Identifier: Apache-2.0
#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <unordered_set>

#include "formats/bin/bin.h"
#include "formats/bin/nano_gpt.h"
#include "formats/encoding/weight_index.h"
#include "formats/tensor_files/indexed_files.h"
#include "formats/tensor_files/placeholders.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard::bin {
namespace {

class BinReader : public TensorFileReader {
 public:
  Status open(const PathSnapshot& place, const OpenOptions& options);
  Status locate(const std::vector<std::size_t>& tensors, int threads, const std::string& spool) override;

 protected:
  Result<std::optional<Json>> made_config() override;

 private:
  Status open_directory(const PathSnapshot& directory, std::string index);
  Status read_file(const std::string& name, const OpenOptions& options);

  std::vector<std::string> names_;  // the files to read
  std::optional<IndexedFiles> index_;
  std::unordered_map<std::string, Error> refusals_;  // of tensors whose values a class computes, by name
  std::vector<std::string> unreadable_;              // objects of classes with tensors, whose content is not read
  std::string prefix_;                               // the prefix that is left out of the names
  std::optional<pickle::Value> model_args_;          // nanoGPT's, if a file has them
};

// Returns whether a file is torch.optim's Optimizer.state_dict(): {"state": {id or name: {...}}, "param_groups":
// [...]}.
bool is_optimizer(const TensorFile& file) {
  const auto root = file.root();
  return root && root->kind() == pickle::Kind::kDict && root->size() == 2 && root->find("state") &&
         root->find("param_groups");
}

// Returns the key that all tensors of a file are below, if it is a usual key for the model.
std::string prefix_of(const TensorFile& file) {
  static constexpr std::array<std::string_view, 3> kWords = {"model", "state_dict", "module"};
  if (file.tensors().empty() || file.tensors().front().path.size() < 2) return {};
  const auto* first = std::get_if<std::string>(&file.tensors().front().path.front());
  if (first == nullptr || std::find(kWords.begin(), kWords.end(), *first) == kWords.end()) return {};
  const auto is_under = [&](const TensorFile::Entry& e) {
    return e.path.size() > 1 && e.path.front() == KeyPath::value_type(*first);
  };
  return std::all_of(file.tensors().begin(), file.tensors().end(), is_under) ? *first : std::string();
}

// Returns whether the data of a tensor is in a value, or may be because there is too much to look at. Skips what is in
// `seen`, and adds what it looks at.
bool holds_storage(const pickle::Value& value, std::unordered_set<std::uint32_t>& seen) {
  using pickle::Kind;
  constexpr std::size_t kMost = 1'000'000;
  std::vector<pickle::Value> stack = {value};
  const auto add = [&](const pickle::Value& v) {
    const Kind k = v.kind();
    const bool has_parts = k == Kind::kObject || k == Kind::kDict || k == Kind::kPersistentId || v.size() > 0;
    if (has_parts && seen.insert(v.identity()).second) stack.push_back(v);
  };
  while (!stack.empty()) {
    const pickle::Value v = stack.back();
    stack.pop_back();
    if (v.kind() == Kind::kPersistentId || seen.size() > kMost) return true;
    for (std::size_t i = 0; i < v.size(); ++i) add(v.kind() == Kind::kDict ? v.value(i) : v[i]);
    for (const pickle::Value& part : {v.state(), v.items(), v.keywords()}) add(part);
    if (v.kind() != Kind::kObject) continue;
    add(v.callee());
    add(v.args());
  }
  return false;
}

// Lists the files to read. `index` is the one that the caller opened, or empty.
Status BinReader::open_directory(const PathSnapshot& directory, std::string index) {
  const std::string& path = directory.path();
  std::vector<std::string> indexes, numbered, variants;
  std::string single;
  for (const DirectoryEntry& e : directory.entries()) {
    if (e.is_directory) continue;
    if (is_index_name(e.name)) indexes.push_back(e.name);
    if (is_variant(e.name))
      variants.push_back(e.name);
    else if (is_numbered_name(e.name))
      numbered.push_back(e.name);
    if (is_single_name(e.name)) single = e.name;
  }
  constexpr std::string_view kOnly = "-00001-of-00001.bin";
  if (single.empty() && numbered.size() == 1 && numbered.front().ends_with(kOnly))
    single = std::exchange(numbered, {}).front();
  if (single.empty() && indexes.empty() && numbered.empty()) {
    if (variants.size() > 1)
      return unsupported(path + ": expected one model, got " + names_text(variants, "file") +
                         "; open one of them by its path");
    if (!variants.empty()) single = variants.front();
  }
  if (single.empty() && indexes.empty() && numbered.empty()) {
    const std::vector<std::string> usual = usual_names(directory);
    single = usual.empty() || directory.has_file(kAdapterFile) ? std::string(kAdapterFile) : usual.front();
  }
  if (index.empty()) index = TRY(index_of_model(path, indexes, ".bin", !single.empty()));
  if (index.empty()) {
    if (single.empty())
      return corrupt(path + ": expected an index next to " + names_text(numbered, "file") +
                     "; without it, some of them may be missing. Open a single file to see what it "
                     "contains.");
    names_ = {single};
    catalog_.stale_files = numbered;
    return {};
  }
  index_ = TRY(IndexedFiles::open(path, index));
  names_ = index_->files();
  if (!single.empty()) numbered.push_back(single);
  const bool is_model = parse_weight_index_name(index, ".bin")->variant.empty();
  for (const std::string& name : numbered)
    if (is_model && !index_->contains(name)) catalog_.stale_files.push_back(name);
  return {};
}

Status BinReader::read_file(const std::string& name, const OpenOptions& options) {
  const auto opened = TRY(open_if_whole(name, options, TensorFile::Parts::kDefer));
  if (!opened) {
    catalog_.unread_files.back().tensors = IndexedFiles::leave_out(index_, name);
    return {};
  }
  const OpenFile& open = *opened;
  const std::string prefix = names_.size() == 1 ? prefix_of(*open.content) : std::string();
  if (!prefix.empty()) prefix_ = prefix;
  const std::string optimizer = is_optimizer(*open.content) ? "optimizer" : "";
  const auto name_of = [&](const std::string& own) { return optimizer.empty() ? own : optimizer + "." + own; };
  const auto path_of = [&](KeyPath path) {
    if (!optimizer.empty()) path.insert(path.begin(), optimizer);
    return path;
  };
  if (const auto root = open.content->root())
    if (const auto found = root->find("model_args")) model_args_ = found;
  for (const TensorFile::Entry& e : open.content->tensors()) {
    const std::string tensor = name_of(prefix.empty() ? e.name : e.name.substr(prefix.size() + 1));
    KeyPath path = path_of(KeyPath(e.path.begin() + (prefix.empty() ? 0 : 1), e.path.end()));
    if (index_ && !index_->is_wanted(tensor, name)) continue;
    TRY(add_tensor(tensor, std::move(path), open.file, e.tensor));
    if (!e.refusal) continue;
    catalog_.tensor(catalog_.tensors().size() - 1).located = false;
    catalog_.has_other_bytes = true;
    refusals_.emplace(tensor, *e.refusal);
  }
  std::unordered_set<std::uint32_t> seen;
  for (const TensorFile::Object& o : open.content->objects()) {
    TRY(add_object(name_of(o.name), path_of(o.path), open.file, o.value));
    if (!prefix.empty() && o.path.size() > 1 && o.path.front() == KeyPath::value_type(prefix))
      catalog_.blobs.back().plain_key = o.name.substr(prefix.size() + 1);  // as its module's tensors
    if (o.value.kind() == pickle::Kind::kObject && holds_storage(o.value, seen)) unreadable_.push_back(o.name);
  }
  return {};
}

Status BinReader::open(const PathSnapshot& place, const OpenOptions& options) {
  catalog_.root = place.is_directory() ? place.path() : parent_path(place.path());
  if (place.is_directory())
    TRY(open_directory(place, ""));
  else if (is_index_name(place.path()))
    TRY(open_directory(*TRY(place.parent()), place.name()));
  else
    names_ = {place.name()};
  for (const std::string& name : names_) TRY(read_file(name, options));
  TRY(refuse_placeholders(catalog_, place));
  if (index_) TRY(check_index(*index_, catalog_.stale_files));
  if (!unreadable_.empty() && catalog_.tensors().empty() && catalog_.unread_files.empty())
    return unsupported(place.path() + ": its tensors are in instances of classes, which are not read: " +
                       names_text(unreadable_, "object") + "; save their state_dict() instead");
  if (!unreadable_.empty())
    catalog_.warnings.push_back("Instances of classes with tensors in them, which are not read: " +
                                names_text(unreadable_, "object") + ". Save their state_dict() instead.");
  catalog_.attributes.emplace_back("format",
                                   "torch.save, " + count_of(std::ssize(names_), "file") + (index_ ? ", index" : ""));
  if (!prefix_.empty())
    catalog_.attributes.emplace_back("names",
                                     "all tensors are under '" + prefix_ + "', which is left out of their names");
  return finish(options);
}

Status BinReader::locate(const std::vector<std::size_t>& tensors, int /*threads*/, const std::string& /*spool*/) {
  if (refusals_.empty()) return {};
  for (const std::size_t i : tensors)
    if (const auto refusal = refusals_.find(catalog_.tensors()[i].name); refusal != refusals_.end())
      return refusal->second;
  return {};
}

// Returns nanoGPT's config, but only if the tensors are GPT-2's: other trainers save arguments with these names for
// other models.
Result<std::optional<Json>> BinReader::made_config() {
  if (!model_args_) return std::optional<Json>();
  for (const Tensor& t : catalog_.tensors())
    if (t.name.ends_with("transformer.h.0.attn.c_attn.weight")) return config_of_nano_gpt(*model_args_, t.dtype);
  return std::optional<Json>();
}

}  // namespace

Result<Index> recorded_step(const std::string& path) {
  Index out = -1;
  TRY(look_if_possible([&]() -> Status {
    const File file = TRY(File::open(path));
    const TensorFile content = TRY(TensorFile::open(file, SafetensorsEnd::kUnchecked, TensorFile::Parts::kDefer));
    const auto root = content.root();
    const auto step = root ? root->find("global_step") : std::nullopt;
    if (step) out = step->as_int().value_or(-1);
    return {};
  }));
  return out;
}

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  return open_as<BinReader>(place, options);
}

}  // namespace reshard::bin
