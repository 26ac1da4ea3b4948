// SPDX-License-Identifier: Apache-2.0
#include "formats/colossalai/reader.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "formats/colossalai/rank_files.h"
#include "formats/encoding/weight_index.h"
#include "lib/base/io_failure_watch.h"
#include "lib/base/json.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/layout/stages.h"

namespace reshard::colossalai {
namespace {

constexpr Index kMaxRunningStates = Index{16} << 20;
constexpr double kMebibyte = 1048576.0;

bool is_near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(1.0, b); }

}  // namespace

// ---- The model

Result<std::vector<ModelFile>> ColossalaiReader::files_of_index(const std::string& name) {
  const std::string directory = at_root(tree_.model);
  const WeightIndex index = TRY(WeightIndex::read(path_join(directory, name)));
  catalog_.metadata_files.push_back(below(tree_.model, name));
  has_index_ = true;
  if (const auto total = index.total_size().as_double()) total_size_ = *total;
  const std::vector<StageIndex> whole = {{index, 0, 0}};
  index_order_ = model_order(whole);
  return model_files(whole);
}

Result<std::vector<ModelFile>> ColossalaiReader::list_model() {
  const PathSnapshot& place = *TRY(place_at(tree_.model));
  const std::string& directory = place.path();
  const PartFiles there = files_of(place, Part::kModel);
  const bool has_temporary = place.has_directory(kTemporaryIndexes);
  if (there.indexes.size() > 1 && tree_.index.empty())
    return unsupported(directory + ": expected one index, got " + names_text(there.indexes, "file") +
                       "; open one of them by its path");
  std::vector<ModelFile> files;
  if (!there.indexes.empty()) {
    files = TRY(files_of_index(tree_.index.empty() ? there.indexes.front() : tree_.index));
    if (has_temporary)
      warn(std::string(kTemporaryIndexes) + "/ is left over from another, interrupted save; the index is used");
  } else if (has_temporary) {
    const StageIndexes stages = TRY(StageIndexes::read(place, there.shards));
    files = stages.files();
    index_order_ = stages.order();
    has_index_ = true;
    total_size_ = stages.total_size();
    warn("The save was interrupted: there is no index, but " + std::string(kTemporaryIndexes) + "/ contains " +
         stages.text() + ", and they cover the whole model. They are used.");
  } else if (const std::string single = single_file(place, Part::kModel); !single.empty()) {
    files.push_back({single, {}});
  } else if (there.shards.empty()) {
    return corrupt(directory + ": expected a model, got neither an index nor shards");
  } else {
    return no_index_error(directory, there.shards);
  }
  std::unordered_set<std::string> used;
  for (const ModelFile& file : files) used.insert(file.name);
  for (const std::string& name : there.shards)
    if (!used.contains(name)) unnamed_.push_back(name);
  return files;
}

// Explains a missing index. Releases 0.4.8 and later fail to write the last shard, that of the head, if the head is
// padded and there is no tensor parallelism.
Error ColossalaiReader::no_index_error(const std::string& directory, const std::vector<std::string>& shards) {
  const std::string what = directory + ": expected an index next to " + names_text(shards, "shard") + ": ";
  constexpr Index kPaddedTo = 64;
  Index rows = 0;  // rows of the embedding
  bool has_head = false, is_read = true;
  const IoFailureWatch watch;
  for (const std::string& name : shards) {
    const auto file = files_.open(path_join(directory, name));
    const auto content = file ? TensorFile::open(**file) : Result<TensorFile>(file.error());
    if (!content && !is_of_file(content.error(), watch)) return content.error();
    is_read = content.has_value();
    if (!is_read) break;
    for (const TensorFile::Entry& e : content->tensors()) {
      if (e.tensor.shape().rank() != 2 || layer_number(e.name) >= 0) continue;
      has_head = has_head || rows == e.tensor.shape()[0];
      if (rows == 0) rows = e.tensor.shape()[0];
    }
  }
  if (is_read && rows > 0 && !has_head && rows % kPaddedTo != 0)
    return corrupt(
        what + "they contain an embedding of " + count_of(rows, "row") +
        " and no head. ColossalAI 0.4.8 and later fail like this without tensor parallelism if the "
        "vocabulary is not a multiple of 64 (AttributeError: _unpad_detach, ColossalAI#6253): the content of the last "
        "shard is lost. Save again with make_vocab_size_divisible_by=1, or open a "
        "single file to see what it contains.");
  return corrupt(what +
                 "the save was interrupted before it was written, and some shards may be missing. "
                 "Open a single file to see what it contains.");
}

// Records the order in which the model defines its parameters. .bin files have it; the entries of safetensors are
// sorted.
void ColossalaiReader::note_order(const TensorFile& content, const std::string& file) {
  is_ordered_ = is_ordered_ && content.is_torch();
  const ShardName name = parse_shard_name(file).value_or(ShardName{});
  std::vector<std::string>& names = file_order_[{name.stage, name.expert, name.shard, file}];
  for (const TensorFile::Entry& e : content.tensors()) names.push_back(e.name);
}

// Lists the parameters in the model's order. An expert-parallel rank's files have the shared parameters in this order,
// and the rank's experts among them.
void ColossalaiReader::list_parameters() {
  std::vector<std::string> names;
  if (!is_ordered_ && index_order_) {
    names = *index_order_;
    is_ordered_ = true;
  } else {
    for (const auto& [file, there] : file_order_) names.insert(names.end(), there.begin(), there.end());
  }
  std::unordered_set<std::string_view> seen;
  for (const std::string& name : names) {
    // Buffers, not parameters.
    if (name.find("rotary_emb.") != std::string::npos || name.ends_with("inv_freq") ||
        name.find("_extra_state") != std::string::npos)
      continue;
    const auto tensor = catalog_.find(name);
    if (tensor && seen.insert(name).second) parameters_.push_back({name, catalog_.tensors()[*tensor].shape});
  }
}

Status ColossalaiReader::read_model_file(const ModelFile& file) {
  const auto opened = TRY(open_if_whole(below(tree_.model, file.name), options_));
  if (!opened) {
    catalog_.unread_files.back().tensors = file.tensors;
    return {};
  }
  const OpenFile& open = *opened;
  is_safetensors_ = is_safetensors_ || !open.content->is_torch();
  add_header_metadata(open.content->metadata());
  if (const auto name = parse_shard_name(file.name); name && name->stage > 0) stages_.insert(name->stage);
  std::unordered_set<std::string_view> there;
  for (const TensorFile::Entry& e : open.content->tensors()) {
    there.insert(e.name);
    const StoredTensor& t = e.tensor;
    stored_bytes_ += bytes_of(t);
    const auto mapped = mapped_.find(e.name);
    if (mapped != mapped_.end() && mapped->second != file.name) {
      copies_.push_back({e.name, open.file, t});
      continue;
    }
    if (mapped == mapped_.end() && has_index_) unindexed_.push_back(e.name);
    TRY(add_tensor(e.name, e.path, open.file, t));
  }
  for (const TensorFile::Object& o : open.content->objects()) {
    there.insert(o.name);
    TRY(add_object(o.name, o.path, open.file, o.value));
  }
  for (const std::string& name : file.tensors)
    if (!there.contains(name))
      return corrupt(catalog_.file_path(open.file) + ": expected " + tensor_text(name) +
                     ", as the index says; it is missing");
  note_order(*open.content, file.name);
  return {};
}

// Adds tensors that are in several files as replicas: all expert-parallel ranks write what they share.
Status ColossalaiReader::add_copies() {
  for (const Copy& copy : copies_) {
    const auto found = catalog_.find(copy.name);
    if (!found && is_partial()) continue;
    if (!found)
      return corrupt(catalog_.file_path(copy.file) + ": '" + printable(copy.name) +
                     "': it is missing in the file that the index names");
    Tensor& tensor = catalog_.tensor(*found);
    const std::string where = catalog_.file_path(copy.file) + ": " + tensor_text(copy.name);
    const std::string other = catalog_.file_path(tensor.fragments.extent(0).file);
    if (copy.stored.dtype != tensor.dtype || copy.stored.shape() != tensor.shape)
      return corrupt(where + ": expected " + type_text(tensor.dtype, tensor.shape) + " as in " + other + ", got " +
                     type_text(copy.stored));
    if (tensor.replicas.empty()) tensor.replicas = FragmentList(tensor.shape.rank());
    tensor.replicas.add(in_file(copy.stored, copy.file));
  }
  copies_.clear();
  return {};
}

// Returns those shards that the index does not name but counts: all of their tensors are in the index with another
// file, and total_size includes them. Expert-parallel ranks each write what they share, the stages of a tied model each
// write the state of the embedding, and a rank with nothing to store writes an empty shard. All other shards are stale.
// If total_size exceeds what can be read, the unreadable shards are damaged ones that count. Fails if a shard cannot be
// looked at, because nothing shows then which of these it is.
Result<std::vector<std::string>> ColossalaiReader::counted_shards(
    const std::string& directory, const std::vector<std::string>& unnamed,
    const std::function<bool(const std::string&)>& is_indexed, double bytes_named, std::optional<double> total_size) {
  if (is_partial()) return std::vector<std::string>();
  const IoFailureWatch watch;
  double bytes = bytes_named;
  bool are_copies = total_size.has_value();
  std::vector<std::string> readable, stale;
  std::vector<Error> damage;
  for (const std::string& name : unnamed) {
    if (!are_copies) break;
    const auto file = files_.open(path_join(at_root(directory), name));
    const auto content = file ? TensorFile::open(**file) : Result<TensorFile>(file.error());
    if (!content) {
      if (!is_of_file(content.error(), watch)) return content.error();
      stale.push_back(name);
      damage.push_back(content.error());
      continue;
    }
    readable.push_back(name);
    for (const TensorFile::Entry& e : content->tensors()) {
      are_copies = are_copies && is_indexed(e.name);
      bytes += bytes_of(e.tensor);
    }
  }
  const bool is_right = are_copies && is_near(*total_size, bytes / kMebibyte);
  const bool lacks_bytes = are_copies && !is_right && *total_size > bytes / kMebibyte;
  if (lacks_bytes && !damage.empty()) {
    for (const Error& error : damage) TRY(leave_out(watch, error));
    return readable;
  }
  if (!is_right) stale = unnamed;
  for (const std::string& name : stale) catalog_.stale_files.push_back(below(directory, name));
  return is_right ? readable : std::vector<std::string>();
}

// Warns if total_size is wrong. ColossalAI gives it in MiB and includes copies.
void ColossalaiReader::check_total_size() {
  if (!total_size_ || is_partial()) return;
  const auto bytes = static_cast<double>(catalog_.tensor_bytes());
  for (const double fits : {bytes / kMebibyte, stored_bytes_ / kMebibyte, bytes})
    if (is_near(*total_size_, fits)) return;
  char text[96];
  std::snprintf(text, sizeof text, "The index gives a total_size of %.6f MiB; the tensors have %.6f.", *total_size_,
                bytes / kMebibyte);
  warn(text);
}

Status ColossalaiReader::open_model() {
  const std::vector<ModelFile> files = TRY(list_model());
  for (const ModelFile& file : files)
    for (const std::string& name : file.tensors) mapped_.emplace(name, file.name);
  for (const ModelFile& file : files) TRY(read_model_file(file));
  const auto is_indexed = [&](const std::string& name) { return mapped_.contains(name); };
  const std::vector<std::string> copies =
      TRY(counted_shards(tree_.model, unnamed_, is_indexed, stored_bytes_, total_size_));
  for (const std::string& name : copies) TRY(read_model_file({name, {}}));
  model_files_ = files.size() + copies.size();
  TRY(add_copies());
  list_parameters();
  TRY(read_config(at_root(tree_.model)));
  check_total_size();
  if (!unindexed_.empty())
    warn("In the shards but not in the index: " + names_text(unindexed_, "tensor") + ". They are read.");
  return {};
}

// Reads whether the config unties the head. Ignores a config that cannot be read, which other code reports.
Status ColossalaiReader::read_config(const std::string& directory) {
  const std::string path = path_join(directory, kConfigFile);
  if (!TRY(has_file(path))) return {};
  const IoFailureWatch watch;
  const auto text = read_whole_file(path, kMaxRunningStates);
  if (!text && watch.may_be_io_failure(text.error())) return text.error();
  const auto json = text ? parse_json(*text, path) : Result<Json>(text.error());
  const Json* tie = json ? json->find("tie_word_embeddings") : nullptr;
  is_untied_ = tie != nullptr && tie->is_bool() && !*tie->as_bool();
  return {};
}

// ---- Other files

Status ColossalaiReader::open_scheduler() {
  if (!TRY(has_file(path_join(tree_.root, kScheduler)))) return {};
  const auto opened = TRY(open_if_whole(std::string(kScheduler), options_));
  if (!opened) return {};
  const OpenFile& open = *opened;
  const auto inside = [](const KeyPath& path) {
    KeyPath out = {std::string(kScheduler)};
    out.insert(out.end(), path.begin(), path.end());
    return out;
  };
  for (const TensorFile::Entry& e : open.content->tensors())
    TRY(add_tensor(std::string(kScheduler) + "." + e.name, inside(e.path), open.file, e.tensor));
  for (const TensorFile::Object& o : open.content->objects())
    TRY(add_object(std::string(kScheduler) + "." + o.name, inside(o.path), open.file, o.value));
  return {};
}

Status ColossalaiReader::open_running_states() {
  const std::string path = path_join(tree_.root, kRunningStates);
  if (!TRY(has_file(path))) {
    if (!tree_.has_optimizer) return {};
    if (is_step_name(base_name(tree_.root)))
      warn(std::string(kRunningStates) +
           " is missing. The training applications write it last, so this save did not finish");
    else
      catalog_.notes.push_back(
          std::string(kRunningStates) +
          " is missing. ColossalAI's training applications write it last, so a save of theirs did not "
          "finish; a script of your own may not write it.");
    return {};
  }
  const std::string text = TRY(read_whole_file(path, kMaxRunningStates));
  const Json json = TRY(parse_json(text, path));
  catalog_.files.push_back({std::string(kRunningStates), std::ssize(text)});
  const auto file = static_cast<std::uint32_t>(catalog_.files.size() - 1);
  for (const Json::Member& member : TRY(json.as_object().context(path)))
    TRY(add_json("train_state." + member.key, {"train_state", member.key}, file, member.value));
  return {};
}

Status ColossalaiReader::open(const PathSnapshot& place, const OpenOptions& options) {
  tree_ = TRY(tree_of(place));
  options_ = options;
  catalog_.root = tree_.root;
  if (tree_.has_model) TRY(open_model());
  if (tree_.has_optimizer && !tree_.has_model) TRY(read_neighbour(place));
  if (tree_.has_optimizer || tree_.is_application) TRY(open_optimizer());
  if (tree_.is_application) {
    TRY(open_scheduler());
    TRY(open_running_states());
  }
  const std::string step = tree_.is_application ? tree_.root : parent_path(tree_.root);
  catalog_.lacks_optimizer =
      !TRY(is_directory(path_join(step, kOptimizer))) &&
      (tree_.is_application || (base_name(tree_.root) == kModeling && is_step_name(base_name(step))));
  std::string text = "ColossalAI";
  if (model_files_ > 0)
    text += std::string(is_safetensors_ ? ", safetensors, " : ", torch.save, ") + count_of(model_files_, "model file");
  if (has_index_) text += ", index";
  if (!stages_.empty()) text += ", " + count_of(std::ssize(stages_), "pipeline stage");
  if (!states_.empty()) text += ", optimizer";
  catalog_.attributes.insert(catalog_.attributes.begin(), {"format", text});
  return finish(options);
}

Result<std::unique_ptr<Reader>> open(const PathSnapshot& place, const OpenOptions& options) {
  if (is_rank_directory(place)) return open_rank_directory(place, options);
  return open_as<ColossalaiReader>(place, options);
}

}  // namespace reshard::colossalai
