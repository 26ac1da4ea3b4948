#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <unordered_set>

#include "formats/colossalai/colossalai.h"
#include "formats/colossalai/names.h"
#include "formats/colossalai/rank_files.h"
#include "formats/colossalai/stage_indexes.h"
#include "formats/encoding/weight_index.h"
#include "formats/tensor_files/parameter_ids.h"
#include "lib/base/json.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/layout/stages.h"

namespace reshard::colossalai {
namespace {

constexpr Index kMaxRunningStates = Index{16} << 20;
constexpr std::size_t kMaxGroupOptions = 64;  // each becomes a value for each parameter
constexpr Index kMaxGroupValues = 2'000'000;
constexpr Index kMaxId = 999'999'999;
constexpr double kMebibyte = 1048576.0;

std::string below(std::string_view directory, const std::string& name) {
  return directory.empty() ? name : path_join(directory, name);
}

bool is_near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(1.0, b); }

double bytes_of(const StoredTensor& tensor) {
  return static_cast<double>(volume(tensor.shape())) * static_cast<double>(byte_size(tensor.dtype));
}

// "state.12.exp_avg" or "12.exp_avg" taken apart.
std::optional<std::pair<Index, std::string>> parse_state_name(std::string_view name) {
  take(name, "state.");
  const auto id = take_number(name);
  if (!id || *id > kMaxId || !take(name, ".") || name.empty()) return std::nullopt;
  return std::pair(*id, std::string(name));
}

// Moments have the shape of their parameter.
bool is_moment(std::string_view key) { return key == "exp_avg" || key == "exp_avg_sq" || key == "momentum_buffer"; }

class ColossalaiReader : public TensorFileReader {
 public:
  Status open(const Place& place, const OpenOptions& options);

 private:
  struct Copy {
    std::string name;
    std::uint32_t file;
    StoredTensor stored;
  };
  // One state of one parameter id, as the optimizer's files have it.
  struct State {
    std::string key;  // "exp_avg"
    std::uint32_t file = 0;
    const StoredTensor* tensor = nullptr;
    std::optional<pickle::Value> value;  // where it is no tensor
    bool is_copy = false;                // the index has the id in another file
  };
  struct Group {
    std::vector<Index> ids;
    std::vector<std::pair<std::string, pickle::Value>> options;
    std::uint32_t file = 0;
  };

  // A parameter's name, or an id: what an index lists.
  using FileOf = std::unordered_map<std::string, std::string>;
  Result<std::vector<std::string>> counted_shards(const std::string& directory, const std::vector<std::string>& unnamed,
                                                  const std::function<bool(const std::string&)>& is_indexed,
                                                  double bytes_named, std::optional<double> total_size);
  Error no_index_error(const std::string& directory, const std::vector<std::string>& shards);

  Status open_model();
  Result<std::vector<ModelFile>> list_model();
  Result<std::vector<ModelFile>> files_of_index(const std::string& name);
  Status read_model_file(const ModelFile& file);
  Status add_copies();
  void check_total_size();
  void note_order(const TensorFile& content, const std::string& file);
  void list_parameters();

  Status open_optimizer();
  Status read_optimizer_file(const std::string& name);
  Status add_groups(pickle::Value list, std::uint32_t file);
  Status add_optimizer();
  ParameterNames names_of(const std::vector<ParameterId>& ids, const std::vector<std::vector<Index>>& groups) const;
  Status add_states(std::map<Index, std::string>& name_of);
  void note_fused(const std::map<Index, std::string>& name_of);
  void read_neighbour(const Place& opened);
  void read_config(const std::string& directory);
  Status open_scheduler();
  Status open_running_states();
  std::string at_root(const std::string& directory) const {
    return directory.empty() ? tree_.root : path_join(tree_.root, directory);
  }
  Result<const Place*> place_at(const std::string& directory) const {
    return directory.empty() ? Result<const Place*>(tree_.place) : tree_.place->inside(directory);
  }
  void warn(std::string text) { catalog_.warnings.push_back(std::move(text)); }

  Tree tree_;
  OpenOptions options_;

  FileOf mapped_;  // of the model's index
  bool has_index_ = false;
  std::vector<std::string> unnamed_;                     // shards of the model that the index does not name
  std::optional<std::vector<std::string>> index_order_;  // of the tensors; nothing: there is none, or it was sorted
  std::map<std::tuple<Index, Index, Index, std::string>, std::vector<std::string>> file_order_;  // likewise, by shard
  std::vector<std::string> unindexed_;
  std::vector<Copy> copies_;
  std::optional<double> total_size_;
  double stored_bytes_ = 0;  // copies included
  std::vector<NamedShape> parameters_;
  bool is_ordered_ = true;  // whether parameters_ has the model's order
  std::set<Index> stages_;
  bool is_safetensors_ = false;
  Index model_files_ = 0;
  bool is_untied_ = false;  // the config says that the head is not the embedding
  std::string neighbour_;   // the model whose parameters an optimizer that was opened alone has

  std::map<Index, std::vector<State>> states_;  // by id
  FileOf mapped_ids_;                           // of the optimizer's index
  double state_bytes_ = 0;
  std::vector<Group> groups_;
  std::set<Index> grouped_ids_;
  Index values_of_groups_ = 0;  // options of each group, for each of its ids
};

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
  const Place& place = *TRY(place_at(tree_.model));
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
      warn(std::string(kTemporaryIndexes) + "/ is left of another save that was interrupted; the index is used");
  } else if (has_temporary) {
    const StageIndexes stages = TRY(StageIndexes::read(place, there.shards));
    files = stages.files();
    index_order_ = stages.order();
    has_index_ = true;
    total_size_ = stages.total_size();
    warn("The save was interrupted: there is no index, but " + std::string(kTemporaryIndexes) + "/ holds " +
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
  for (const ModelFile& file : files)
    if (!path_exists(path_join(directory, file.name)))
      return io_error(path_join(directory, file.name) + ": file is missing; it holds " +
                      names_text(file.tensors, "tensor"));
  return files;
}

// Releases 0.4.8 and later fail on the last shard, that of the head, where nothing is tensor-parallel and the head is
// padded.
Error ColossalaiReader::no_index_error(const std::string& directory, const std::vector<std::string>& shards) {
  const std::string what = directory + ": expected an index beside " + names_text(shards, "shard") + ": ";
  constexpr Index kPaddedTo = 64;
  Index rows = 0;  // of the embedding
  bool has_head = false, is_read = true;
  for (const std::string& name : shards) {
    const auto file = files_.open(path_join(directory, name));
    const auto content = file ? TensorFile::open(**file) : Result<TensorFile>(file.error());
    is_read = is_read && content.has_value();
    if (!is_read) break;
    for (const TensorFile::Entry& e : content->tensors()) {
      if (e.tensor.shape().rank() != 2 || layer_number(e.name) >= 0) continue;
      has_head = has_head || rows == e.tensor.shape()[0];
      if (rows == 0) rows = e.tensor.shape()[0];
    }
  }
  if (is_read && rows > 0 && !has_head && rows % kPaddedTo != 0)
    return corrupt(what + "they hold an embedding of " + with_commas(rows) +
                   " rows and no head. ColossalAI 0.4.8 and later fail so without tensor parallelism where the "
                   "vocabulary is no multiple of 64 (AttributeError: _unpad_detach, ColossalAI#6253): what the last "
                   "shard would have held is in no file. Save again with make_vocab_size_divisible_by=1, or open a "
                   "single file to see what it holds.");
  return corrupt(what +
                 "the save was interrupted before it was written, and nothing tells whether all shards are there. "
                 "Open a single file to see what it holds.");
}

// Names have to be kept in the order in which the model defines its parameters: .bin files have it, the entries of
// safetensors were sorted.
void ColossalaiReader::note_order(const TensorFile& content, const std::string& file) {
  is_ordered_ = is_ordered_ && content.is_torch();
  const ShardName name = parse_shard_name(file).value_or(ShardName{});
  std::vector<std::string>& names = file_order_[{name.stage, name.expert, name.shard, file}];
  for (const TensorFile::Entry& e : content.tensors()) names.push_back(e.name);
}

// A rank of expert parallelism has in its files all that it shares with the others, in their order, and its experts.
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
    // Not parameters, though stored like them.
    if (name.find("rotary_emb.") != std::string::npos || name.ends_with("inv_freq") ||
        name.find("_extra_state") != std::string::npos)
      continue;
    const auto tensor = catalog_.find(name);
    if (tensor && seen.insert(name).second) parameters_.push_back({name, catalog_.tensors()[*tensor].shape});
  }
}

Status ColossalaiReader::read_model_file(const ModelFile& file) {
  const OpenFile open = TRY(open_file(below(tree_.model, file.name), options_));
  is_safetensors_ = is_safetensors_ || !open.content->is_torch();
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
                     ", as the index says; it is not there");
  note_order(*open.content, file.name);
  return {};
}

// What is in several files: expert-parallel ranks all write what they share.
Status ColossalaiReader::add_copies() {
  for (const Copy& copy : copies_) {
    const auto found = catalog_.find(copy.name);
    if (!found)
      return corrupt(catalog_.file_path(copy.file) + ": '" + printable(copy.name) +
                     "': the file that the index names lacks it");
    Tensor& tensor = catalog_.tensor(*found);
    const std::string where = catalog_.file_path(copy.file) + ": " + tensor_text(copy.name);
    const std::string other = catalog_.file_path(tensor.fragments.extent(0).file);
    if (copy.stored.dtype != tensor.dtype || copy.stored.shape() != tensor.shape)
      return corrupt(where + ": expected " + std::string(info(tensor.dtype).torch_name) + " " +
                     to_string(tensor.shape) + " as in " + other + ", got " +
                     std::string(info(copy.stored.dtype).torch_name) + " " + to_string(copy.stored.shape()));
    if (tensor.replicas.empty()) tensor.replicas = FragmentList(tensor.shape.rank());
    tensor.replicas.add(in_file(copy.stored, copy.file));
  }
  copies_.clear();
  return {};
}

// Of the shards that the index does not name, those that it counts: what they hold is all in the index as another
// file's, and total_size is right with them. The ranks of expert parallelism write what they share, and the stages of a
// tied model its embedding's state, each for itself; what has nothing to store writes an empty shard. The others are
// stale.
Result<std::vector<std::string>> ColossalaiReader::counted_shards(
    const std::string& directory, const std::vector<std::string>& unnamed,
    const std::function<bool(const std::string&)>& is_indexed, double bytes_named, std::optional<double> total_size) {
  double bytes = bytes_named;
  bool are_copies = total_size.has_value();
  for (const std::string& name : unnamed) {
    if (!are_copies) break;
    const auto file = files_.open(path_join(at_root(directory), name));
    const auto content = file ? TensorFile::open(**file) : Result<TensorFile>(file.error());
    are_copies = content.has_value();
    if (!are_copies) break;
    for (const TensorFile::Entry& e : content->tensors()) {
      are_copies = are_copies && is_indexed(e.name);
      bytes += bytes_of(e.tensor);
    }
  }
  if (are_copies && is_near(*total_size, bytes / kMebibyte)) return unnamed;
  for (const std::string& name : unnamed) catalog_.stale_files.push_back(below(directory, name));
  return std::vector<std::string>();
}

// ColossalAI counts MiB, and every copy.
void ColossalaiReader::check_total_size() {
  if (!total_size_) return;
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
  model_files_ = static_cast<Index>(files.size() + copies.size());
  TRY(add_copies());
  list_parameters();
  read_config(at_root(tree_.model));
  check_total_size();
  if (!unindexed_.empty())
    warn("In the shards but not in the index: " + names_text(unindexed_, "tensor") + ". Read all the same.");
  return {};
}

// Of the config, whether it unties the head; a config that cannot be read is for others to name.
void ColossalaiReader::read_config(const std::string& directory) {
  const std::string path = path_join(directory, kConfigFile);
  const auto text = has_file(path) ? read_whole_file(path, kMaxRunningStates) : Result<std::string>(std::string());
  const auto json = text ? parse_json(*text, path) : Result<Json>(text.error());
  const Json* tie = json ? json->find("tie_word_embeddings") : nullptr;
  is_untied_ = tie != nullptr && tie->is_bool() && !*tie->as_bool();
}

// ---- The optimizer

// Of a model that lies where one belongs, the parameters, for an optimizer that was opened alone.
void ColossalaiReader::read_neighbour(const Place& opened) {
  const bool is_file = !tree_.optimizer_file.empty();
  if (!is_file && base_name(tree_.root) != kOptimizer) return;
  const auto around = (is_file ? opened : *tree_.place).parent();
  const auto modeling = around ? (*around)->inside(kModeling) : Result<const Place*>(around.error());
  if (!modeling) return;
  ColossalaiReader model;
  model.options_ = {.files_too = false, .validated = false};
  const auto read = [&](const Place& root, const std::string& file) -> Status {
    model.tree_.place = &root;
    model.tree_.root = model.catalog_.root = root.path();
    if (file.empty()) return model.open_model();
    TRY(model.read_model_file({file, {}}));
    model.list_parameters();
    return {};
  };
  neighbour_ = (*modeling)->path();
  Status done = (*modeling)->is_directory() ? read(**modeling, "") : Status(io_error("none"));
  for (const std::string_view file : {"model.bin", "model.safetensors", "pytorch_model.bin"}) {
    if (done || !is_file || !(*around)->has_file(file)) continue;
    neighbour_ = path_join((*around)->path(), file);
    done = read(**around, std::string(file));
  }
  if (!done) return neighbour_.clear();
  parameters_ = std::move(model.parameters_);
  is_ordered_ = model.is_ordered_;
  is_untied_ = model.is_untied_;
}

Status ColossalaiReader::add_groups(pickle::Value list, std::uint32_t file) {
  if (list.kind() != pickle::Kind::kList) return list.mismatch("param_groups", "a list");
  for (std::size_t g = 0; g < list.size(); ++g) {
    if (list[g].kind() != pickle::Kind::kDict) return list[g].mismatch("param_groups", "dicts");
    if (list[g].size() > kMaxGroupOptions)
      return list[g].mismatch("param_groups", "at most " + std::to_string(kMaxGroupOptions) + " options");
    Group group;
    group.file = file;
    for (std::size_t i = 0; i < list[g].size(); ++i) {
      const auto key = list[g].key(i).as_string();
      const pickle::Value value = list[g].value(i);
      if (!key) return list[g].key(i).mismatch("param_groups", "names as keys");
      if (*key != "params") {
        group.options.emplace_back(*key, value);
        continue;
      }
      for (std::size_t k = 0; k < value.size(); ++k) {
        const auto id = value[k].as_int();
        if (!id || *id < 0) return value[k].mismatch("param_groups: params", "an id of 0 or more");
        if (!grouped_ids_.insert(*id).second) return value[k].mismatch("param_groups: params", "an id of one group");
        group.ids.push_back(*id);
      }
    }
    values_of_groups_ += std::ssize(group.ids) * std::ssize(group.options);
    if (values_of_groups_ > kMaxGroupValues)
      return list[g].mismatch("param_groups", "at most " + with_commas(kMaxGroupValues) + " options of all parameters");
    groups_.push_back(std::move(group));
  }
  return {};
}

Status ColossalaiReader::read_optimizer_file(const std::string& name) {
  const OpenFile open = TRY(open_file(below(tree_.optimizer, name), options_));
  const std::string path = catalog_.file_path(open.file);
  const auto add = [&](const std::string& key, State state) -> Status {
    auto parsed = parse_state_name(key);
    if (!parsed) return corrupt(path + ": expected states of parameter ids, got '" + printable(key) + "'");
    if (state.tensor != nullptr) state_bytes_ += bytes_of(*state.tensor);
    const auto mapped = mapped_ids_.find(std::to_string(parsed->first));
    state.is_copy = mapped != mapped_ids_.end() && mapped->second != name;
    state.key = std::move(parsed->second);
    states_[parsed->first].push_back(std::move(state));
    return {};
  };
  const auto root = open.content->root();
  // A file of groups is a list; an unsharded one has them beside the states.
  if (root && root->kind() == pickle::Kind::kList) return add_groups(*root, open.file);
  const bool is_whole = root && root->find("param_groups");
  if (is_whole) TRY(add_groups(*root->find("param_groups"), open.file));
  const auto is_of_groups = [](std::string_view key) {
    return key == "param_groups" || key.starts_with("param_groups.");
  };
  for (const TensorFile::Entry& e : open.content->tensors())
    if (!is_of_groups(e.name)) TRY(add(e.name, State{"", open.file, &e.tensor, std::nullopt, false}));
  for (const TensorFile::Object& o : open.content->objects()) {
    if (!is_of_groups(o.name)) {
      TRY(add(o.name, State{"", open.file, nullptr, o.value, false}));
    } else if (!is_whole) {
      TRY(add_groups(o.value, open.file));
    }
  }
  return {};
}

Status ColossalaiReader::open_optimizer() {
  if (!tree_.optimizer_file.empty()) {
    TRY(read_optimizer_file(tree_.optimizer_file));
    return add_optimizer();
  }
  const Place& place = *TRY(place_at(tree_.optimizer));
  const std::string& directory = place.path();
  const auto unread = [&](const std::string& why) {
    warn("The optimizer's state is not read: " + why);
    return Status();
  };
  constexpr std::string_view kHint =
      ". ColossalAI's save of a tensor-parallel optimizer fails where the vocabulary is not a multiple of its padding "
      "(\"The parameter isn't evenly distributed among tensor parallel group\"), and up to 0.4.7 the model that it "
      "wrote before then lacks rows: compare the embedding with the config's vocab_size.";
  if (!place.is_directory()) {
    const std::string why = "there is no " + std::string(kOptimizer) +
                            "/: this is a final model, or its save failed there" + std::string(kHint);
    if (is_step_name(base_name(tree_.root))) return unread(why);
    catalog_.notes.push_back("The optimizer's state is not read: " + why);
    return {};
  }
  const PartFiles there = files_of(place, Part::kOptimizer);
  std::vector<std::string> names, unnamed;
  std::string groups(kGroupFile);
  std::optional<double> total_size;
  if (there.indexes.empty()) {
    const std::string single = single_file(place, Part::kOptimizer);
    if (single.empty() && there.shards.empty())
      return unread((tree_.optimizer.empty() ? "the directory" : tree_.optimizer + "/") + " holds no optimizer files" +
                    std::string(kHint));
    if (single.empty())
      return unread("there is no index beside " + names_text(there.shards, "shard") +
                    ": its save was interrupted, or failed" + std::string(kHint));
    names.push_back(single);
  } else if (there.indexes.size() > 1) {
    return unread("expected one index, got " + names_text(there.indexes, "file"));
  } else {
    const WeightIndex index = TRY(WeightIndex::read(path_join(directory, there.indexes.front())));
    catalog_.metadata_files.push_back(below(tree_.optimizer, there.indexes.front()));
    names = index.files();
    if (!index.param_groups().empty()) groups = index.param_groups();
    if (const auto total = index.total_size().as_double()) total_size = *total;
    for (const WeightIndex::Entry& e : index.entries()) mapped_ids_.emplace(e.name, e.file);
    for (const std::string& shard : there.shards)
      if (!std::binary_search(names.begin(), names.end(), shard)) unnamed.push_back(shard);
  }
  std::vector<std::string> gone;
  for (const std::string& name : names)
    if (!path_exists(path_join(directory, name))) gone.push_back(name);
  if (!gone.empty()) return unread("missing are " + names_text(gone, "shard"));
  for (const std::string& name : names) TRY(read_optimizer_file(name));
  const auto is_indexed = [&](const std::string& name) {
    const auto state = parse_state_name(name);
    return state && mapped_ids_.contains(std::to_string(state->first));
  };
  for (const std::string& name : TRY(counted_shards(tree_.optimizer, unnamed, is_indexed, state_bytes_, total_size)))
    TRY(read_optimizer_file(name));
  if (has_file(path_join(directory, groups))) {
    TRY(read_optimizer_file(groups));
  } else if (groups_.empty()) {
    warn(below(tree_.optimizer, groups) +
         " is missing: learning rates and other options of the optimizer are not known");
  }
  return add_optimizer();
}

// The states and groups, under the parameters' names where those are known.
Status ColossalaiReader::add_optimizer() {
  std::set<Index> all;
  for (const auto& [id, states] : states_) all.insert(id);
  std::vector<std::vector<Index>> groups;
  for (const Group& group : groups_) {
    all.insert(group.ids.begin(), group.ids.end());
    groups.push_back(group.ids);
  }
  std::vector<ParameterId> ids;
  for (const Index id : all) {
    const auto states = states_.find(id);
    ParameterId parameter{id, std::nullopt, states == states_.end()};
    if (!parameter.is_fresh)
      for (const State& s : states->second)
        if (s.tensor != nullptr && is_moment(s.key)) parameter.shape = s.tensor->shape();
    ids.push_back(parameter);
  }
  const ParameterNames names = names_of(ids, groups);
  std::map<Index, std::string> name_of;
  for (std::size_t i = 0; i < ids.size(); ++i)
    name_of[ids[i].id] = names.names.empty() ? std::to_string(ids[i].id) : names.names[i];
  const std::string evidence = names.evidence + (neighbour_.empty() ? "" : "; the model is " + neighbour_);
  if (!names.names.empty()) {
    catalog_.attributes.emplace_back("optimizer ids", evidence);
  } else if (!states_.empty()) {
    warn("The optimizer's states keep their ids for names (optimizer.state.0.exp_avg): " + evidence);
  }
  if (states_.empty())
    catalog_.notes.emplace_back("The optimizer has no state yet: it was saved before its first step.");
  TRY(add_states(name_of));
  for (const Group& group : groups_)
    for (const Index id : group.ids)
      for (const auto& [option, value] : group.options) {
        const std::string inner = "param_groups." + name_of[id] + "." + option;
        TRY(add_object("optimizer." + inner, {"optimizer", inner}, group.file, value));
      }
  note_fused(name_of);
  return {};
}

// A tied model on several pipeline stages has the embedding twice, the second time as the head, and one id for both.
ParameterNames ColossalaiReader::names_of(const std::vector<ParameterId>& ids,
                                          const std::vector<std::vector<Index>>& groups) const {
  const NameOrder order = is_ordered_ ? NameOrder::kByStage : NameOrder::kSorted;
  ParameterNames names = name_parameters(parameters_, order, ids, groups);
  const auto is_outside = [](const NamedShape& p) { return p.shape.rank() == 2 && layer_number(p.name) < 0; };
  const auto embedding = std::find_if(parameters_.begin(), parameters_.end(), is_outside);
  const auto head = std::find_if(parameters_.rbegin(), parameters_.rend(), is_outside);
  if (!names.names.empty() || parameters_.size() != ids.size() + 1 || embedding == parameters_.end() ||
      &*embedding == &*head || embedding->shape != head->shape || is_untied_)
    return names;
  std::vector<NamedShape> own;
  for (const NamedShape& p : parameters_)
    if (&p != &*head) own.push_back(p);
  ParameterNames without = name_parameters(own, order, ids, groups);
  if (without.names.empty()) return names;
  without.evidence += "; " + printable(head->name) + " is tied to " + printable(embedding->name);
  return without;
}

// Moments that ZeRO had cut are flat where they are of experts: in the file's order they are the parameter's.
Status ColossalaiReader::add_states(std::map<Index, std::string>& name_of) {
  std::unordered_map<std::string_view, const Dims*> shapes;
  for (const NamedShape& p : parameters_) shapes.emplace(p.name, &p.shape);
  const auto unflattened = [&](Index id, const State& s) {
    StoredTensor stored = *s.tensor;
    const auto shape = shapes.find(name_of[id]);
    if (shape == shapes.end() || !is_moment(s.key) || stored.shape().rank() != 1 || stored.strides[0] != 1 ||
        volume(*shape->second) != stored.shape()[0])
      return stored;
    stored.box = whole(*shape->second);
    stored.strides = row_major_strides(*shape->second);
    return stored;
  };
  const auto inner_name = [&](Index id, const State& s) { return "state." + name_of[id] + "." + s.key; };
  const auto add = [&](Index id, const State& s) -> Status {
    const std::string inner = inner_name(id, s), name = "optimizer." + inner;
    KeyPath path = {"optimizer", inner};
    return s.tensor != nullptr ? add_tensor(name, std::move(path), s.file, unflattened(id, s))
                               : add_object(name, std::move(path), s.file, *s.value);
  };
  for (const auto& [id, states] : states_) {
    const bool has_own = std::any_of(states.begin(), states.end(), [](const State& s) { return !s.is_copy; });
    for (const State& s : states) {
      if (!s.is_copy || !has_own) {
        TRY(add(id, s));
      } else if (s.tensor != nullptr) {
        copies_.push_back({"optimizer." + inner_name(id, s), s.file, unflattened(id, s)});
      }
    }
  }
  return add_copies();
}

// ColossalAI gathers the moments of a fused layer as if it were an ordinary one: over several ranks they come out as
// the ranks had them, the sections of query, key and value interleaved (gather_distributed_param of the parameter, and
// none for its states, in checkpoint_io/utils.py). No file tells how many ranks there were.
void ColossalaiReader::note_fused(const std::map<Index, std::string>& name_of) {
  std::vector<std::string> fused;
  for (const auto& [id, states] : states_)
    if (const std::string& name = name_of.at(id); name.find(".attn.c_attn.") != std::string::npos)
      fused.push_back(name);
  if (!fused.empty())
    catalog_.notes.push_back(
        "If the run was tensor-parallel, the moments of fused layers are permuted against their parameters: ColossalAI "
        "joins them rank by rank, and nothing here tells how many ranks there were. " +
        names_text(fused, "parameter") + ".");
}

// ---- What is beside them

Status ColossalaiReader::open_scheduler() {
  if (!has_file(path_join(tree_.root, kScheduler))) return {};
  const OpenFile open = TRY(open_file(std::string(kScheduler), options_));
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
  if (!has_file(path)) {
    if (!tree_.has_optimizer) return {};
    if (is_step_name(base_name(tree_.root)))
      warn(std::string(kRunningStates) +
           " is missing: it is what the training applications write last, so this save did not finish");
    else
      catalog_.notes.push_back("There is no " + std::string(kRunningStates) +
                               ", which ColossalAI's training applications write last: a script of your own need not "
                               "write one, a save of theirs did not finish.");
    return {};
  }
  const std::string text = TRY(read_whole_file(path, kMaxRunningStates));
  const Json json = TRY(parse_json(text, path));
  catalog_.files.push_back({std::string(kRunningStates), static_cast<Index>(text.size())});
  const auto file = static_cast<std::uint32_t>(catalog_.files.size() - 1);
  for (const Json::Member& member : TRY(json.as_object().context(path)))
    TRY(add_json("train_state." + member.key, {"train_state", member.key}, file, member.value));
  return {};
}

Status ColossalaiReader::open(const Place& place, const OpenOptions& options) {
  tree_ = TRY(tree_of(place));
  options_ = options;
  catalog_.root = tree_.root;
  if (tree_.has_model) TRY(open_model());
  if (tree_.has_optimizer && !tree_.has_model) read_neighbour(place);
  if (tree_.has_optimizer || tree_.is_application) TRY(open_optimizer());
  if (tree_.is_application) {
    TRY(open_scheduler());
    TRY(open_running_states());
  }
  const std::string step = tree_.is_application ? tree_.root : parent_path(tree_.root);
  catalog_.lacks_optimizer =
      !is_directory(path_join(step, kOptimizer)) &&
      (tree_.is_application || (base_name(tree_.root) == kModeling && is_step_name(base_name(step))));
  std::string text = "ColossalAI";
  if (model_files_ > 0)
    text += std::string(is_safetensors_ ? ", safetensors, " : ", torch.save, ") + count_of(model_files_, "model file");
  if (has_index_) text += ", index";
  if (!stages_.empty()) text += ", " + count_of(static_cast<Index>(stages_.size()), "pipeline stage");
  if (!states_.empty()) text += ", optimizer";
  catalog_.attributes.insert(catalog_.attributes.begin(), {"format", text});
  return finish(options);
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const Place& place, const OpenOptions& options) {
  if (is_rank_directory(place)) return open_rank_directory(place, options);
  return open_as<ColossalaiReader>(place, options);
}

}  // namespace reshard::colossalai
