#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <unordered_set>

#include "formats/colossalai/colossalai.h"
#include "formats/colossalai/names.h"
#include "formats/colossalai/rank_files.h"
#include "formats/colossalai/stage_indexes.h"
#include "formats/encoding/weight_index.h"
#include "formats/tensor_files/parameter_ids.h"
#include "lib/base/json.h"
#include "lib/base/text.h"

namespace reshard::colossalai {
namespace {

constexpr Index kMaxRunningStates = Index{16} << 20;
constexpr std::size_t kMaxGroupOptions = 64;  // each becomes a value for each parameter
constexpr double kMebibyte = 1048576.0;

std::string below(std::string_view directory, const std::string& name) {
  return directory.empty() ? name : path_join(directory, name);
}

class ColossalaiReader : public TensorFileReader {
 public:
  Status open(const std::string& path, const OpenOptions& options);

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
  };
  struct Group {
    std::vector<Index> ids;
    std::vector<std::pair<std::string, pickle::Value>> options;
    std::uint32_t file = 0;
  };

  Status open_model();
  Result<std::vector<ModelFile>> list_model();
  Result<std::vector<ModelFile>> files_of_index(const std::string& name);
  Status read_model_file(const ModelFile& file);
  Status add_copies();
  void check_total_size();
  void note_order(const TensorFile& content, const ModelFile& file);

  Status open_optimizer();
  Status read_optimizer_file(const std::string& name);
  Status add_groups(pickle::Value list, std::uint32_t file);
  Status add_states();
  Status open_scheduler();
  Status open_running_states();
  std::string at_root(const std::string& directory) const {
    return directory.empty() ? tree_.root : path_join(tree_.root, directory);
  }
  void warn(std::string text) { catalog_.warnings.push_back(std::move(text)); }

  Tree tree_;
  OpenOptions options_;

  std::unordered_map<std::string, std::string> mapped_;  // file of each tensor, by the index
  bool has_index_ = false;
  std::vector<std::string> unindexed_;
  std::vector<Copy> copies_;
  std::optional<double> total_size_;
  double stored_bytes_ = 0;  // copies included
  std::vector<NamedShape> parameters_;
  bool is_ordered_ = true;  // whether parameters_ has the model's order
  std::set<Index> stages_;
  bool is_safetensors_ = false;
  Index model_files_ = 0;

  std::map<Index, std::vector<State>> states_;  // by id
  std::vector<Group> groups_;
};

// ---- The model

Result<std::vector<ModelFile>> ColossalaiReader::files_of_index(const std::string& name) {
  const std::string directory = at_root(tree_.model);
  const WeightIndex index = TRY(WeightIndex::read(path_join(directory, name)));
  catalog_.metadata_files.push_back(below(tree_.model, name));
  has_index_ = true;
  if (const auto total = index.total_size().as_double()) total_size_ = *total;
  return model_files({{index, 0, 0}});
}

Result<std::vector<ModelFile>> ColossalaiReader::list_model() {
  const std::string directory = at_root(tree_.model);
  const PartFiles there = TRY(files_of(directory, Part::kModel));
  const bool has_temporary = is_directory(path_join(directory, kTemporaryIndexes));
  if (there.indexes.size() > 1 && tree_.index.empty())
    return unsupported(directory + ": expected one index, got " + names_text(there.indexes, "file") +
                       "; open one of them by its path");
  std::vector<ModelFile> files;
  if (!there.indexes.empty()) {
    files = TRY(files_of_index(tree_.index.empty() ? there.indexes.front() : tree_.index));
    if (has_temporary)
      warn(std::string(kTemporaryIndexes) + "/ is left of another save that was interrupted; the index is used");
  } else if (has_temporary) {
    const StageIndexes stages = TRY(StageIndexes::read(directory, there.shards));
    files = stages.files();
    has_index_ = true;
    total_size_ = stages.total_size();
    warn("The save was interrupted: there is no index, but " + std::string(kTemporaryIndexes) + "/ holds " +
         stages.text() + ", and they cover the whole model. They are used.");
  } else if (const std::string single = single_file(directory, Part::kModel); !single.empty()) {
    files.push_back({single, {}});
  } else if (there.shards.empty()) {
    return corrupt(directory + ": expected a model, got neither an index nor shards");
  } else {
    return corrupt(directory + ": expected an index beside " + names_text(there.shards, "shard") +
                   ": the save was interrupted before it was written, and nothing tells whether all shards are there. "
                   "Open a single file to see what it holds.");
  }
  std::unordered_set<std::string> used;
  for (const ModelFile& file : files) used.insert(file.name);
  for (const std::string& name : there.shards)
    if (!used.contains(name)) catalog_.stale_files.push_back(below(tree_.model, name));
  for (const ModelFile& file : files)
    if (!path_exists(path_join(directory, file.name)))
      return io_error(path_join(directory, file.name) + ": file is missing; it holds " +
                      names_text(file.tensors, "tensor"));
  return files;
}

// The order in which the model defines its parameters, as far as a file tells: .bin files have it, the entries of
// safetensors were sorted, and an index has it unless it was sorted.
void ColossalaiReader::note_order(const TensorFile& content, const ModelFile& file) {
  const auto note = [&](const std::string& name, const Dims& shape) {
    // Not parameters, though stored like them.
    if (!name.ends_with("inv_freq") && name.find("_extra_state") == std::string::npos)
      parameters_.push_back({name, shape});
  };
  const auto is_mine = [&](const std::string& name) {
    const auto mapped = mapped_.find(name);
    return mapped == mapped_.end() || mapped->second == file.name;
  };
  if (content.is_torch() || file.tensors.empty()) {
    is_ordered_ = is_ordered_ && content.is_torch();
    for (const TensorFile::Entry& e : content.tensors())
      if (is_mine(e.name)) note(e.name, e.tensor.shape());
    return;
  }
  std::unordered_map<std::string_view, const Dims*> shapes;
  for (const TensorFile::Entry& e : content.tensors()) shapes.emplace(e.name, &e.tensor.shape());
  for (const std::string& name : file.tensors)
    if (const auto shape = shapes.find(name); shape != shapes.end()) note(name, *shape->second);
  is_ordered_ = is_ordered_ && (file.tensors.size() < 3 || !std::is_sorted(file.tensors.begin(), file.tensors.end()));
}

Status ColossalaiReader::read_model_file(const ModelFile& file) {
  const OpenFile open = TRY(open_file(below(tree_.model, file.name), options_));
  is_safetensors_ = is_safetensors_ || !open.content->is_torch();
  if (const auto name = parse_shard_name(file.name); name && name->stage > 0) stages_.insert(name->stage);
  std::unordered_set<std::string_view> there;
  for (const TensorFile::Entry& e : open.content->tensors()) {
    there.insert(e.name);
    const StoredTensor& t = e.tensor;
    stored_bytes_ += static_cast<double>(volume(t.shape())) * static_cast<double>(byte_size(t.dtype));
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
      return corrupt(catalog_.file_path(open.file) + ": expected tensor '" + printable(name) +
                     "', as the index says; it is not there");
  note_order(*open.content, file);
  return {};
}

// What is in several files: expert-parallel ranks all write what they share.
Status ColossalaiReader::add_copies() {
  for (const Copy& copy : copies_) {
    Tensor& tensor = catalog_.tensor(*catalog_.find(copy.name));
    const std::string where = catalog_.file_path(copy.file) + ": tensor '" + printable(copy.name) + "'";
    const std::string other = catalog_.file_path(tensor.fragments.extent(0).file);
    if (copy.stored.dtype != tensor.dtype || copy.stored.shape() != tensor.shape)
      return corrupt(where + ": expected " + std::string(info(tensor.dtype).torch_name) + " " +
                     to_string(tensor.shape) + " as in " + other + ", got " +
                     std::string(info(copy.stored.dtype).torch_name) + " " + to_string(copy.stored.shape()));
    if (tensor.replicas.empty()) tensor.replicas = FragmentList(tensor.shape.rank());
    tensor.replicas.add(in_file(copy.stored, copy.file));
  }
  return {};
}

// ColossalAI counts MiB, and every copy.
void ColossalaiReader::check_total_size() {
  if (!total_size_) return;
  const auto is_near = [&](double bytes) { return std::abs(*total_size_ - bytes) <= 1e-9 * std::max(1.0, bytes); };
  const auto bytes = static_cast<double>(catalog_.tensor_bytes());
  if (is_near(bytes / kMebibyte) || is_near(stored_bytes_ / kMebibyte) || is_near(bytes)) return;
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
  model_files_ = static_cast<Index>(files.size());
  TRY(add_copies());
  check_total_size();
  if (!unindexed_.empty())
    warn("In the shards but not in the index: " + names_text(unindexed_, "tensor") + ". Read all the same.");
  return {};
}

// ---- The optimizer

// "state.12.exp_avg" or "12.exp_avg" taken apart.
std::optional<std::pair<Index, std::string>> parse_state_name(std::string_view name) {
  if (name.starts_with("state.")) name.remove_prefix(std::string_view("state.").size());
  Index id = 0;
  std::size_t digits = 0;
  for (; digits < name.size() && digits < 9 && name[digits] >= '0' && name[digits] <= '9'; ++digits)
    id = 10 * id + (name[digits] - '0');
  if (digits == 0 || digits + 1 >= name.size() || name[digits] != '.') return std::nullopt;
  return std::pair(id, std::string(name.substr(digits + 1)));
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
        group.ids.push_back(*id);
      }
    }
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
    if (!is_of_groups(e.name)) TRY(add(e.name, State{"", open.file, &e.tensor, std::nullopt}));
  for (const TensorFile::Object& o : open.content->objects()) {
    if (!is_of_groups(o.name)) {
      TRY(add(o.name, State{"", open.file, nullptr, o.value}));
    } else if (!is_whole) {
      TRY(add_groups(o.value, open.file));
    }
  }
  return {};
}

Status ColossalaiReader::open_optimizer() {
  const std::string directory = at_root(tree_.optimizer);
  const auto unread = [&](const std::string& why) {
    warn("The optimizer's state is not read: " + why);
    return Status();
  };
  constexpr std::string_view kHint =
      ". ColossalAI's save of a tensor-parallel optimizer fails where the vocabulary is not a multiple of its padding "
      "(\"The parameter isn't evenly distributed among tensor parallel group\"), and up to 0.4.7 the model that it "
      "wrote "
      "before then lacks rows: compare the embedding with the config's vocab_size.";
  if (!is_directory(directory))
    return unread("there is no " + std::string(kOptimizer) + "/: this is a final model, or its save failed there" +
                  std::string(kHint));
  const PartFiles there = TRY(files_of(directory, Part::kOptimizer));
  std::vector<std::string> names;
  std::string groups(kGroupFile);
  if (there.indexes.empty()) {
    const std::string single = single_file(directory, Part::kOptimizer);
    if (single.empty() && there.shards.empty())
      return unread((tree_.optimizer.empty() ? "the directory" : tree_.optimizer + "/") + " holds no optimizer files" +
                    std::string(kHint));
    if (single.empty())
      return unread("there is no index beside " + names_text(there.shards, "shard") + ": its save was interrupted");
    names.push_back(single);
  } else if (there.indexes.size() > 1) {
    return unread("expected one index, got " + names_text(there.indexes, "file"));
  } else {
    const WeightIndex index = TRY(WeightIndex::read(path_join(directory, there.indexes.front())));
    catalog_.metadata_files.push_back(below(tree_.optimizer, there.indexes.front()));
    names = index.files();
    if (!index.param_groups().empty()) groups = index.param_groups();
    for (const std::string& shard : there.shards)
      if (!std::binary_search(names.begin(), names.end(), shard))
        catalog_.stale_files.push_back(below(tree_.optimizer, shard));
  }
  std::vector<std::string> gone;
  for (const std::string& name : names)
    if (!path_exists(path_join(directory, name))) gone.push_back(name);
  if (!gone.empty()) return unread("missing are " + names_text(gone, "shard"));
  for (const std::string& name : names) TRY(read_optimizer_file(name));
  if (has_file(path_join(directory, groups))) {
    TRY(read_optimizer_file(groups));
  } else if (groups_.empty()) {
    warn(below(tree_.optimizer, groups) +
         " is missing: learning rates and other options of the optimizer are not known");
  }
  return add_states();
}

// The states and groups, under the parameters' names where those are known.
Status ColossalaiReader::add_states() {
  std::set<Index> all;
  for (const auto& [id, states] : states_) all.insert(id);
  std::vector<std::vector<Index>> groups;
  for (const Group& group : groups_) {
    all.insert(group.ids.begin(), group.ids.end());
    groups.push_back(group.ids);
  }
  std::vector<ParameterId> ids;
  for (const Index id : all) {
    ParameterId parameter{id, std::nullopt};
    if (const auto states = states_.find(id); states != states_.end())
      for (const State& s : states->second)
        if (s.tensor != nullptr && (s.key == "exp_avg" || s.key == "exp_avg_sq" || s.key == "momentum_buffer"))
          parameter.shape = s.tensor->shape();
    ids.push_back(parameter);
  }
  const ParameterNames names =
      name_parameters(parameters_, is_ordered_ ? NameOrder::kByStage : NameOrder::kSorted, ids, groups);
  std::map<Index, std::string> name_of;
  for (std::size_t i = 0; i < ids.size(); ++i)
    name_of[ids[i].id] = names.names.empty() ? std::to_string(ids[i].id) : names.names[i];
  if (names.names.empty()) {
    warn("The optimizer's states keep their ids for names (optimizer.state.0.exp_avg): " + names.evidence);
  } else {
    catalog_.attributes.emplace_back("optimizer ids", names.evidence);
  }
  const auto key = [](const std::string& parent, const std::string& parameter, const std::string& name) {
    return parent + "." + parameter + "." + name;
  };
  for (const auto& [id, states] : states_)
    for (const State& s : states) {
      const std::string inner = key("state", name_of[id], s.key);
      KeyPath path = {"optimizer", inner};
      if (s.tensor != nullptr) {
        TRY(add_tensor("optimizer." + inner, std::move(path), s.file, *s.tensor));
      } else {
        TRY(add_object("optimizer." + inner, std::move(path), s.file, *s.value));
      }
    }
  for (const Group& group : groups_)
    for (const Index id : group.ids)
      for (const auto& [option, value] : group.options) {
        const std::string inner = key("param_groups", name_of[id], option);
        TRY(add_object("optimizer." + inner, {"optimizer", inner}, group.file, value));
      }
  return {};
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
    if (tree_.has_optimizer)
      warn(std::string(kRunningStates) +
           " is missing: it is what the training applications write last, so this save did "
           "not finish");
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

Status ColossalaiReader::open(const std::string& path, const OpenOptions& options) {
  tree_ = tree_of(path);
  options_ = options;
  catalog_.root = tree_.root;
  if (tree_.has_model) TRY(open_model());
  if (tree_.has_optimizer || tree_.is_application) TRY(open_optimizer());
  if (tree_.is_application) {
    TRY(open_scheduler());
    TRY(open_running_states());
  }
  if (!is_directory(path_join(tree_.is_application ? tree_.root : parent_path(tree_.root), kOptimizer)))
    catalog_.lacks_optimizer = tree_.is_application || base_name(tree_.root) == kModeling;
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

Result<std::unique_ptr<Reader>> open(const std::string& path, const OpenOptions& options) {
  if (is_rank_directory(path)) return open_rank_directory(path, options);
  auto reader = std::make_unique<ColossalaiReader>();
  TRY(reader->open(path, options));
  return std::unique_ptr<Reader>(std::move(reader));
}

}  // namespace reshard::colossalai
