#include "formats/tensor_files/reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "formats/deepspeed/deepspeed.h"
#include "formats/deepspeed/flat_groups.h"
#include "formats/deepspeed/pipeline_names.h"
#include "formats/deepspeed/rank_files.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/tensor_files/flat_runs.h"
#include "formats/tensor_files/parameter_ids.h"
#include "lib/base/names.h"
#include "lib/base/parallel.h"
#include "lib/base/text.h"

namespace reshard::deepspeed {
namespace {

constexpr std::string_view kMasterState = "fp32_param";  // in the optimizer's state, as Megatron has it there too
constexpr std::string_view kMasterFile = "fp32";
constexpr std::string_view kStateFile = ".pt";
// What DeepSpeed copies beside its checkpoints.
constexpr std::array<std::string_view, 2> kScripts = {"zero_to_fp32.py", "zero_to_torch.py"};
// What the Trainer and Accelerate save beside the engine's directory.
constexpr std::array<std::string_view, 4> kModelFiles = {"model.safetensors", "model.safetensors.index.json",
                                                         "pytorch_model.bin", "pytorch_model.bin.index.json"};

std::string file_names(const std::vector<std::string>& names, Index count) {
  std::vector<std::string> quoted;
  for (const std::string& name : names) quoted.push_back("'" + printable(name) + "'");
  return count_of(count, "file") + " (" + join(quoted, ", ") +
         (count > std::ssize(names) ? " and " + with_commas(count - std::ssize(names)) + " more" : "") + ")";
}

// A parameter or buffer of the model, and what there is of it.
struct Weight {
  DType dtype = DType::kFloat32;  // as the model computes with it, where `computes`
  bool computes = false;          // the module has it, or a placeholder of it
  std::optional<Tensor> stored;   // as the module has it
  std::optional<Tensor> master;
  std::vector<Tensor> states;                               // their names are the states'
  std::vector<std::pair<std::string, std::string>> values;  // pickled
  std::string values_file;
};

class DeepspeedReader : public TensorFileReader {
 public:
  Status open(const std::string& path, const OpenOptions& options);

 private:
  template <class T, class Read>
  Result<std::vector<T>> read_files(const std::vector<std::string>& names, const Read& read);

  Status check_models(Index parts) const;
  Status check_ranks(Index part, Index ranks) const;
  Status check_experts() const;
  Status read_models(const OpenOptions& options);
  Status add_module(const ModelStates& states, std::uint32_t file);
  Status read_module_files();
  Status join_frozen();
  Status read_optimizers();
  Status check_states(Index part, const std::vector<RankStates>& ranks) const;
  Status check_steps(const std::vector<RankStates>& ranks);
  Result<std::string> scalar_of(const StoredTensor& tensor);
  Status add_parameters(const std::vector<RankStates>& ranks, const std::vector<FlatParameter>& parameters);
  Status add_parameter_group(std::size_t g, const ParameterGroup& group, std::uint32_t file,
                             const std::vector<std::string>& names);
  Status read_plain_optimizer();
  Status read_universal();
  Status resolve_shared();
  std::map<std::string, std::string> plain_names();
  Status finish_weights(Weights wanted);
  Status add_extra();
  void describe_run(Weights wanted);

  std::string universal_path(const std::string& parameter) const {
    return set_.directory + std::string(kUniversalDirectory) + "/" + parameter;
  }
  bool has_rank_models() const { return set_.has_rank_models(); }
  const ModelStates& first() const { return models_.begin()->second; }
  Index parts() const {
    const Index models = set_.models.rbegin()->first.first + 1;
    return set_.optimizers.empty() ? models : std::max(models, set_.optimizers.rbegin()->first.first + 1);
  }
  void warn(std::string text) { catalog_.warnings.push_back(std::move(text)); }

  FileSet set_;
  const TensorFile* first_file_ = nullptr;
  std::map<std::pair<Index, Index>, ModelStates> models_;  // by part and rank
  std::map<std::pair<Index, Index>, std::uint32_t> model_files_;
  std::map<std::string, Weight> weights_;
  std::map<std::string, std::string> shared_;
  std::set<std::string> universal_;  // parameters that have a directory
  std::set<std::string> left_out_;
  std::string optimizer_;  // for people: "ZeRO 3"
  Index ranks_ = 0;        // data-parallel
  bool has_masters_ = false;
};

// ---- Files

// Several at a time; they become the last of the catalog's files, in this order. `read` gets an open file, its path and
// its number.
template <class T, class Read>
Result<std::vector<T>> DeepspeedReader::read_files(const std::vector<std::string>& names, const Read& read) {
  const auto base = static_cast<std::uint32_t>(catalog_.files.size());
  std::vector<std::optional<T>> contents(names.size());
  std::vector<Index> sizes(names.size());
  TRY(parallel_for(std::ssize(names), thread_count(0), [&](int, Index i) -> Status {
    const auto k = static_cast<std::size_t>(i);
    const auto file = TRY(files_.open(path_join(catalog_.root, names[k])));
    sizes[k] = TRY(file->size());
    contents[k] = TRY(read(*file, file->path(), base + static_cast<std::uint32_t>(k)));
    return {};
  }));
  std::vector<T> out;
  for (std::size_t i = 0; i < names.size(); ++i) {
    catalog_.files.push_back({names[i], sizes[i]});
    out.push_back(std::move(*contents[i]));
  }
  return out;
}

// That there is a file of each rank and part that the others tell of.
Status DeepspeedReader::check_models(Index parts) const {
  constexpr Index kShown = 3;
  std::vector<std::string> missing;
  Index count = 0;
  for (Index part = 0; part < parts; ++part) {
    const auto begin = set_.models.lower_bound({part, -1});
    const bool is_there = begin != set_.models.end() && begin->first.first == part;
    if (is_there && (begin->first.second < 0) == has_rank_models())
      return corrupt(path_join(catalog_.root, begin->second) +
                     ": the model states of ZeRO 3's ranks, and those of all " +
                     "ranks, are in one directory: files of two saves");
    if (is_there) continue;
    const std::string number = std::to_string(part);
    if (++count <= kShown)
      missing.push_back(set_.directory + "mp_rank_" + (part < 10 ? "0" : "") + number + "_model_states.pt");
  }
  if (count == 0) return {};
  return io_error(catalog_.root + ": missing " + file_names(missing, count) + ": each has a part of the model");
}

// The same of the optimizer states of one part, and of ZeRO 3's model states.
Status DeepspeedReader::check_ranks(Index part, Index ranks) const {
  constexpr std::size_t kShown = 3;
  const auto check = [&](const auto& files, std::string_view kind) -> Status {
    std::vector<std::string> missing;
    Index there = 0;
    for (auto it = files.lower_bound({part, 0}); it != files.end() && it->first.first == part; ++it, ++there)
      if (it->first.second >= ranks)
        return corrupt(path_join(catalog_.root, it->second) + ": expected files of " + count_of(ranks, "rank") +
                       ", as dp_world_size has it, got that of rank " + std::to_string(it->first.second) +
                       ": files of two saves in one directory");
    const bool is_bf16 = kind == "optim" && std::any_of(files.begin(), files.end(), [](const auto& f) {
                           return base_name(f.second).starts_with("bf16_");
                         });
    for (Index rank = 0; rank < ranks && there < ranks && missing.size() < kShown; ++rank)
      if (!files.contains({part, rank}))
        missing.push_back(set_.directory + (is_bf16 ? "bf16_" : "") + "zero_pp_rank_" + std::to_string(rank) +
                          "_mp_rank_" + (part < 10 ? "0" : "") + std::to_string(part) + "_" + std::string(kind) +
                          "_states.pt");
    if (there == ranks) return {};
    return io_error(catalog_.root + ": missing " + file_names(missing, ranks - there) + " of " +
                    count_of(ranks, "rank") +
                    ": each parameter is the runs of all ranks. Copy them from the machines " + "that wrote them");
  };
  if (has_rank_models()) TRY(check(set_.models, "model"));
  return set_.is_universal ? Status() : check(set_.optimizers, "optim");
}

Status DeepspeedReader::check_experts() const {
  constexpr std::size_t kShown = 3;
  std::vector<std::string> missing;
  Index want = 0, there = 0;
  const auto& experts = first().experts;
  for (std::size_t layer = 0; layer < experts.size(); ++layer) {
    want = checked_add(want, experts[layer]).value_or(INT64_MAX);
    for (Index e = 0; e < experts[layer] && missing.size() < kShown; ++e)
      if (!set_.experts.contains({static_cast<Index>(layer), e}))
        missing.push_back(set_.directory + "layer_" + std::to_string(layer) + "_expert_" + std::to_string(e) +
                          "_mp_rank_00_model_states.pt");
  }
  for (const auto& [number, name] : set_.experts) {
    const auto [layer, e] = number;
    if (layer >= std::ssize(experts) || e >= experts[static_cast<std::size_t>(layer)])
      return corrupt(path_join(catalog_.root, name) + ": an expert that num_experts of the model states does not " +
                     "count: files of two saves in one directory");
    ++there;
  }
  if (missing.empty()) return {};
  return io_error(catalog_.root + ": missing " + file_names(missing, want - there) + " of " + count_of(want, "expert"));
}

// ---- The model

Status DeepspeedReader::read_models(const OpenOptions& options) {
  TRY(check_models(parts()));
  const auto& [key, name] = *set_.models.begin();
  const OpenFile open = TRY(open_file(name, options));
  first_file_ = open.content;
  models_.emplace(key, TRY(read_model_states(*open.content, catalog_.file_path(open.file))));
  model_files_.emplace(key, open.file);
  const Index told = first().mp_ranks.value_or(1);
  if (told > kMaxMeshRanks)
    return corrupt(catalog_.file_path(open.file) + ": mp_world_size: " + with_commas(told) + " are too many");
  TRY(check_models(std::max(parts(), told)));

  std::vector<std::pair<Index, Index>> keys;
  std::vector<std::string> names;
  for (auto it = std::next(set_.models.begin()); it != set_.models.end(); ++it) {
    keys.push_back(it->first);
    names.push_back(it->second);
  }
  const auto base = static_cast<std::uint32_t>(catalog_.files.size());
  auto others = TRY(read_files<ModelStates>(
      names, [&](const File& file, const std::string& path, std::uint32_t number) -> Result<ModelStates> {
        ModelStates out = TRY(read_model_states(TRY(TensorFile::open(file)), path));
        if (keys[number - base].second > 0) {  // of what all ranks have alike the first rank's is enough
          out.groups.reset();
          std::erase_if(out.module, [&](const NamedTensor& t) {
            return t.tensor.shape() == Dims{0} && !out.buffers.contains(t.name);
          });
        }
        return out;
      }));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (others[i].steps != first().steps)
      return corrupt(path_join(catalog_.root, names[i]) + ": global_steps is " +
                     (others[i].steps ? std::to_string(*others[i].steps) : "missing") + ", and " +
                     (first().steps ? std::to_string(*first().steps) : "missing") + " in " + name +
                     ": files of two steps. Take those of one save");
    model_files_.emplace(keys[i], base + static_cast<std::uint32_t>(i));
    models_.emplace(keys[i], std::move(others[i]));
  }
  if (parts() > 1 && set_.layers.empty() && !set_.is_universal)
    return unsupported(catalog_.root + ": model states of " + count_of(parts(), "tensor-parallel rank") +
                       ", and how their parts join is not in the files; ds_to_universal.py makes a universal " +
                       "checkpoint of them, which is read");
  if (set_.is_universal)
    for (const DirectoryEntry& e :
         TRY(list_directory(path_join(catalog_.root, set_.directory + std::string(kUniversalDirectory)))))
      if (e.is_directory) universal_.insert(e.name);
  for (const auto& [number, states] : models_) {
    if (number.second <= 0) shared_.insert(states.shared.begin(), states.shared.end());
    TRY(add_module(states, model_files_.at(number)));
  }
  return read_module_files();
}

// What the module of one file has. A placeholder of ZeRO 3 has no elements where the parameter has some.
Status DeepspeedReader::add_module(const ModelStates& states, std::uint32_t file) {
  for (const NamedTensor& entry : states.module) {
    const StoredTensor& tensor = entry.tensor;
    Weight& weight = weights_[entry.name];
    const bool is_placeholder = universal_.contains(entry.name) || (tensor.shape() == Dims{0} && has_rank_models() &&
                                                                    !states.buffers.contains(entry.name));
    const std::string what = catalog_.file_path(file) + ": " + tensor_text(entry.name);
    if (weight.computes && (weight.dtype != tensor.dtype || weight.stored.has_value() == is_placeholder ||
                            (weight.stored && weight.stored->shape != tensor.shape())))
      return corrupt(what + ": expected it as in the files of other ranks, got " +
                     std::string(info(tensor.dtype).torch_name) + " " + to_string(tensor.shape()));
    weight.dtype = tensor.dtype;
    if (!is_placeholder) {
      if (!weight.stored) {
        weight.stored.emplace();
        weight.stored->dtype = tensor.dtype;
        weight.stored->shape = tensor.shape();
        weight.stored->fragments = weight.stored->replicas = FragmentList(tensor.shape().rank());
      }
      (weight.computes ? weight.stored->replicas : weight.stored->fragments).add(in_file(tensor, file));
    }
    weight.computes = true;
  }
  return {};
}

// The layers of a pipeline, and experts.
Status DeepspeedReader::read_module_files() {
  std::vector<std::string> names, prefixes;
  for (const auto& [layer, name] : set_.layers) {
    names.push_back(name);
    prefixes.push_back(std::to_string(layer) + ".");
  }
  TRY(check_experts());
  for (const auto& [number, name] : set_.experts) {
    names.push_back(name);
    prefixes.emplace_back();
  }
  const auto base = static_cast<std::uint32_t>(catalog_.files.size());
  const auto contents = TRY(read_files<ModelStates>(
      names, [&](const File& file, const std::string&, std::uint32_t number) -> Result<ModelStates> {
        ModelStates out;
        const TensorFile content = TRY(TensorFile::open(file));
        for (const TensorFile::Entry& entry : content.tensors())
          out.module.push_back({prefixes[number - base] + entry.name, entry.tensor});
        return out;
      }));
  for (std::size_t i = 0; i < contents.size(); ++i) TRY(add_module(contents[i], base + static_cast<std::uint32_t>(i)));
  if (!first().has_module && set_.layers.empty() && !set_.is_universal)
    return io_error(catalog_.root +
                    ": missing the files layer_00-model_states.pt and so on, a pipeline's weights: its " +
                    "model states have none");
  return {};
}

// What ZeRO 3's ranks have of the parameters that were not trained: equal runs. Others have them whole in the module.
Status DeepspeedReader::join_frozen() {
  if (!has_rank_models()) return {};
  struct Joined {
    Dims shape;
    DType dtype = DType::kFloat32;
    std::vector<Fragment> fragments;
  };
  std::map<std::string, Joined> all;
  for (const auto& [number, states] : models_) {
    const std::uint32_t file = model_files_.at(number);
    for (const NamedTensor& piece : states.frozen) {
      const std::string what = catalog_.file_path(file) + ": frozen_param_fragments: " + tensor_text(piece.name);
      const StoredTensor& flat = piece.tensor;
      const auto shape = states.frozen_shapes.find(piece.name);
      if (shape == states.frozen_shapes.end()) return corrupt(what + ": expected its shape in frozen_param_shapes");
      Joined& joined = all.try_emplace(piece.name, Joined{shape->second, flat.dtype, {}}).first->second;
      const Index elements = volume(shape->second), each = ceil_div(elements, ranks_);
      const Index begin = std::min(elements, number.second * each), end = std::min(elements, begin + each);
      if (joined.shape != shape->second || joined.dtype != flat.dtype || flat.shape().rank() != 1 ||
          flat.shape()[0] < end - begin || (flat.shape()[0] > 1 && flat.strides[0] != 1))
        return corrupt(what + ": expected a vector of " + with_commas(end - begin) + " numbers, this rank's of " +
                       to_string(joined.shape) + " as other ranks have it, got " + to_string(flat.shape()));
      for (Fragment& fragment : fragments_of_run(shape->second, begin, end, flat, 0)) {
        fragment.extent.file = file;
        joined.fragments.push_back(fragment);
      }
    }
  }
  for (const auto& [name, joined] : all) {
    Weight& weight = weights_[name];
    if (weight.stored) continue;
    Tensor& tensor = weight.stored.emplace();
    tensor.dtype = weight.dtype = joined.dtype;
    tensor.shape = joined.shape;
    tensor.fragments = tensor.replicas = FragmentList(tensor.shape.rank());
    for (const Fragment& fragment : joined.fragments) tensor.fragments.add(fragment);
    weight.computes = true;
  }
  return {};
}

// ---- The optimizer

Status DeepspeedReader::read_optimizers() {
  for (const auto& [number, states] : models_)
    if (states.dp_ranks) ranks_ = std::max(ranks_, *states.dp_ranks);
  if (ranks_ == 0)
    for (const auto& [number, name] : set_.optimizers) ranks_ = std::max(ranks_, number.second + 1);
  if (ranks_ == 0 || ranks_ > kMaxMeshRanks)
    return corrupt(catalog_.root + ": dp_world_size: expected up to " + with_commas(kMaxMeshRanks) + " ranks, got " +
                   with_commas(ranks_));
  if (set_.is_universal) return read_universal();
  if (set_.optimizers.empty() && !has_rank_models()) {
    catalog_.lacks_optimizer = first().groups.has_value();
    optimizer_ = first().groups ? "without its optimizer states" : "without ZeRO";
    if (first().groups)
      warn(
          "The files of optimizer states are not there (zero_pp_rank_0_mp_rank_00_optim_states.pt and so on): masters "
          "and moments are missing");
    return read_plain_optimizer();
  }
  std::vector<ParameterGroup> groups;
  std::vector<std::vector<std::string>> names;  // of the parameters in each
  for (Index part = 0; part < parts(); ++part) {
    TRY(check_ranks(part, ranks_));
    std::vector<std::string> files;
    for (Index rank = 0; rank < ranks_; ++rank) files.push_back(set_.optimizers.at({part, rank}));
    const ModelStates& model = models_.lower_bound({part, -1})->second;
    const auto ranks = TRY(read_files<RankStates>(
        files, [&](const File& file, const std::string& path, std::uint32_t number) -> Result<RankStates> {
          const TorchFile content = TRY(TorchFile::open(file, 0, TRY(file.size())));
          OptimizerStates states = TRY(read_optimizer_states(content, path, !model.groups));
          RankStates out{path, std::move(states)};
          for (GroupState& group : out.states.groups) {
            if (group.master) group.master->extent.file = number;
            for (auto& [name, tensor] : group.tensors) tensor.extent.file = number;
          }
          return out;
        }));
    TRY(check_states(part, ranks));
    TRY(check_steps(ranks));
    std::map<std::string, Dims> shapes;
    if (!model.groups)
      for (const auto& [name, weight] : weights_)
        if (weight.stored) shapes.emplace(name, weight.stored->shape);
    const auto parameters = TRY(model.groups ? find_parameters(ranks, *model.groups) : find_parameters(ranks, shapes));
    TRY(add_parameters(ranks, parameters));
    // All ranks have the same options, and the stages of a pipeline the same groups.
    const OptimizerStates& states = ranks[0].states;
    left_out_.insert(states.left_out.begin(), states.left_out.end());
    if (part == 0) groups = states.param_groups;
    names.resize(groups.size());
    for (std::size_t g = 0; g < std::min(groups.size(), states.param_groups.size()); ++g) {
      const auto& list = states.param_groups[g].ids;
      const std::set<Index> ids(list.begin(), list.end());
      for (const FlatParameter& p : parameters)
        if (ids.contains(static_cast<Index>(p.group))) names[g].push_back(p.parameter.name);
    }
    optimizer_ = states.stage             ? "ZeRO " + std::to_string(*states.stage)
                 : states.cuts_parameters ? "ZeRO 3"
                                          : "BF16_Optimizer";
  }
  for (std::size_t g = 0; g < groups.size(); ++g)
    TRY(add_parameter_group(g, groups[g], model_files_.begin()->second, names[g]));
  return {};
}

// That the states are of the stage that the names tell of.
Status DeepspeedReader::check_states(Index part, const std::vector<RankStates>& ranks) const {
  const bool is_third = has_rank_models();
  const std::string model = set_.models.lower_bound({part, -1})->second;
  for (const RankStates& rank : ranks) {
    const auto& stage = rank.states.stage;
    const bool says_third = stage ? *stage == 3 : rank.states.cuts_parameters;
    if (says_third != is_third || rank.states.cuts_parameters != is_third || (stage && *stage > 3))
      return corrupt(rank.path + ": states of ZeRO " + (stage ? std::to_string(*stage) : "1 or 2") + ", and " +
                     printable(model) + " is the name of model states of ZeRO " + (is_third ? "3" : "1 or 2") +
                     ": files of two saves");
  }
  return {};
}

// The number that a tensor without dimensions is; as text, so that any dtype will do.
Result<std::string> DeepspeedReader::scalar_of(const StoredTensor& tensor) {
  std::array<std::byte, 16> bytes{};
  const auto size = static_cast<std::size_t>(byte_size(tensor.dtype));
  const auto file = TRY(files_.open(catalog_.file_path(tensor.extent.file)));
  TRY(file->read_at(tensor.extent.offset + tensor.start, std::span(bytes).first(size)));
  if (tensor.dtype == DType::kFloat32 && !tensor.big_endian) {
    float value = 0;
    std::memcpy(&value, bytes.data(), sizeof value);
    if (value >= 0 && value < 1e15F && value == static_cast<float>(static_cast<Index>(value)))
      return with_commas(static_cast<Index>(value));
  }
  if (tensor.dtype == DType::kInt64 && !tensor.big_endian) {
    Index value = 0;
    std::memcpy(&value, bytes.data(), sizeof value);
    return with_commas(value);
  }
  std::string out = "0x";
  for (std::size_t i = 0; i < size; ++i) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    out += kDigits[std::to_integer<std::size_t>(bytes[i] >> 4)];
    out += kDigits[std::to_integer<std::size_t>(bytes[i] & std::byte{15})];
  }
  return out;
}

// What is a number and no vector is the same on all ranks: the step.
Status DeepspeedReader::check_steps(const std::vector<RankStates>& ranks) {
  const RankStates& one = ranks[0];
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const RankStates& other = ranks[r];
    for (std::size_t g = 0; g < std::min(one.states.groups.size(), other.states.groups.size()); ++g) {
      const auto differ = [&](const std::string& name, const std::string& here, const std::string& there) {
        return corrupt(other.path + ": group " + std::to_string(g) + ": " + printable(name) + " is " + there +
                       ", and " + here + " in " + base_name(one.path) + ": files of two steps. Take those of one save");
      };
      for (const auto& [name, tensor] : one.states.groups[g].tensors) {
        const auto& all = other.states.groups[g].tensors;
        const auto found = all.find(name);
        if (tensor.shape().rank() > 0 || found == all.end() || found->second.shape().rank() > 0 ||
            (tensor.crc && tensor.crc == found->second.crc))
          continue;
        const std::string here = TRY(scalar_of(tensor)), there = TRY(scalar_of(found->second));
        if (here != there) return differ(name, here, there);
      }
      const auto& all = other.states.groups[g].values;
      for (const auto& [name, pickle] : one.states.groups[g].values)
        if (const auto found = all.find(name); found != all.end() && found->second != pickle)
          return differ(name, "another", "one number");
    }
  }
  return {};
}

// One kind of vector (`flat` gives a rank's, or null), as a tensor of the parameter.
template <class Flat>
Result<Tensor> joined(const FlatParameter& parameter, const std::vector<RankStates>& ranks, std::string name,
                      const Flat& flat) {
  Tensor out;
  out.shape = parameter.parameter.shape;
  out.fragments = out.replicas = FragmentList(out.shape.rank());
  bool is_first = true;
  for (const Run& run : parameter.runs) {
    const StoredTensor* vector = flat(run.rank);
    const auto what = [&] {
      return ranks[run.rank].path + ": group " + std::to_string(parameter.group) + ": " + printable(name);
    };
    if (!vector || vector->shape().rank() != 1)
      return corrupt(what() + ": expected a vector, as other ranks have it: a file of another run");
    const auto end = checked_add(run.at, run.end - run.begin);
    if (!end || *end > vector->shape()[0])
      return corrupt(what() + ": expected " + with_commas(end.value_or(INT64_MAX)) + " numbers, up to the end of '" +
                     printable(parameter.parameter.name) + "', got " + with_commas(vector->shape()[0]) +
                     ": cut short, or of another run");
    if (!is_first && out.dtype != vector->dtype)
      return corrupt(what() + ": expected " + std::string(info(out.dtype).torch_name) + " as on other ranks, got " +
                     std::string(info(vector->dtype).torch_name));
    out.dtype = vector->dtype;
    is_first = false;
    for (const Fragment& fragment : fragments_of_run(out.shape, run.begin, run.end, *vector, run.at))
      out.fragments.add(fragment);
  }
  out.name = std::move(name);
  return out;
}

Status DeepspeedReader::add_parameters(const std::vector<RankStates>& ranks,
                                       const std::vector<FlatParameter>& parameters) {
  std::vector<std::string> without_weights;
  for (const FlatParameter& p : parameters) {
    const auto known = weights_.find(p.parameter.name);
    if (known == weights_.end()) {
      const std::size_t dot = p.parameter.name.find('.');
      const auto layer = as_number(p.parameter.name.substr(0, dot));
      if (!set_.layers.empty() && layer && !set_.layers.contains(*layer))
        return io_error(catalog_.root + ": missing '" + set_.directory + "layer_" + (*layer < 10 ? "0" : "") +
                        std::to_string(*layer) + "-model_states.pt', the weights of a layer that has optimizer states");
      without_weights.push_back(p.parameter.name);
    }
    Weight& weight = known == weights_.end() ? weights_[p.parameter.name] : known->second;
    if (weight.master)
      return corrupt(catalog_.root + ": " + tensor_text(p.parameter.name) + ": two parts have optimizer states of it");
    if (weight.stored && weight.stored->shape != p.parameter.shape)
      return corrupt(catalog_.root + ": " + tensor_text(p.parameter.name) + ": param_shapes has " +
                     to_string(p.parameter.shape) + ", the module " + to_string(weight.stored->shape));
    weight.master = TRY(joined(p, ranks, std::string(kMasterState), [&](std::size_t r) {
      const auto& master = ranks[r].states.groups[p.group].master;
      return master ? &*master : nullptr;
    }));
    has_masters_ = true;
    const std::size_t holder = p.runs.empty() ? 0 : p.runs.front().rank;
    const GroupState& group = ranks[holder].states.groups[p.group];
    for (const auto& [name, tensor] : group.tensors) {
      if (tensor.shape().rank() > 0) {
        const std::string& state = name;
        weight.states.push_back(TRY(joined(p, ranks, name, [&](std::size_t r) -> const StoredTensor* {
          const auto& tensors = ranks[r].states.groups[p.group].tensors;
          const auto found = tensors.find(state);
          return found == tensors.end() ? nullptr : &found->second;
        })));
        continue;
      }
      Tensor scalar;  // a step, which is each one's
      scalar.name = name;
      scalar.dtype = tensor.dtype;
      scalar.fragments.add(tensor);
      weight.states.push_back(std::move(scalar));
    }
    weight.values.assign(group.values.begin(), group.values.end());
  }
  if (!without_weights.empty())
    warn("Parameters with optimizer states that no module has: " + names_text(without_weights, "parameter"));
  return {};
}

// The options of a group, and the names of its parameters.
Status DeepspeedReader::add_parameter_group(std::size_t g, const ParameterGroup& group, std::uint32_t file,
                                            const std::vector<std::string>& names) {
  const auto add = [&](const std::string& option, std::string value) {
    return add_pickled("optimizer.param_groups." + std::to_string(g) + "." + option,
                       {"optimizer", "param_groups", static_cast<Index>(g), option}, file, std::move(value));
  };
  for (const auto& option : group.options) TRY(add(option.first, option.second));
  pickle::PickleWriter w;
  w.empty_list();
  pickle::ElementRuns runs(w, &pickle::PickleWriter::append_items);
  for (const std::string& name : names) {
    runs.next();
    w.text(name);
  }
  runs.end();
  return add("params", std::move(w).finish());
}

// A universal checkpoint: a directory for each parameter, a file for each of its states. ZeRO 3's have lost their
// shape.
Status DeepspeedReader::read_universal() {
  if (has_rank_models()) TRY(check_ranks(0, ranks_));
  struct State {
    std::string parameter, name;
    std::optional<StoredTensor> tensor;
    std::string value;  // pickled, where it is none
  };
  std::vector<std::string> files;
  std::vector<std::pair<std::string, std::string>> owners;
  for (const std::string& parameter : universal_)
    for (const DirectoryEntry& e : TRY(list_directory(path_join(catalog_.root, universal_path(parameter))))) {
      if (e.is_directory || !e.name.ends_with(kStateFile)) continue;
      files.push_back(universal_path(parameter) + "/" + e.name);
      owners.emplace_back(parameter, e.name.substr(0, e.name.size() - kStateFile.size()));
    }
  const auto base = static_cast<std::uint32_t>(catalog_.files.size());
  const auto states = TRY(
      read_files<State>(files, [&](const File& file, const std::string& path, std::uint32_t number) -> Result<State> {
        const auto& [parameter, name] = owners[number - base];
        State out{parameter, name, {}, {}};
        const TensorFile content = TRY(TensorFile::open(file));
        for (const TensorFile::Entry& entry : content.tensors())
          if (entry.name == "param" || entry.name == "value") out.tensor = entry.tensor;
        if (out.tensor) {
          out.tensor->extent.file = number;
          return out;
        }
        const auto root = content.root();
        pickle::PickleWriter w;
        if (!root || (!root->as_int() && !root->as_float()) || !pickle::write_value(w, *root))
          return corrupt(path + ": expected a tensor, alone or as 'param', or a number");
        out.value = std::move(w).finish();
        return out;
      }));
  std::map<std::string, Dims> shapes;
  std::vector<std::vector<std::string>> groups;
  for (const auto& [number, model] : models_) {
    if (number.second > 0 || !model.groups) continue;
    groups.resize(std::max(groups.size(), model.groups->size()));
    for (std::size_t g = 0; g < model.groups->size(); ++g)
      for (const NamedShape& p : (*model.groups)[g]) {
        if (!universal_.contains(p.name))
          return io_error(catalog_.root + ": missing '" + printable(universal_path(p.name)) +
                          "', the states of a parameter that param_shapes names");
        if (shapes.emplace(p.name, p.shape).second) groups[g].push_back(p.name);
      }
  }
  for (const State& state : states) {
    Weight& weight = weights_[state.parameter];
    if (!state.tensor) {
      weight.values.emplace_back(state.name, state.value);
      continue;
    }
    const StoredTensor& stored = *state.tensor;
    const auto shape = shapes.find(state.parameter);
    const bool is_flat = stored.shape().rank() == 1 && shape != shapes.end() && shape->second.rank() != 1;
    Tensor tensor;
    tensor.name = state.name == kMasterFile ? kMasterState : std::string_view(state.name);
    tensor.dtype = stored.dtype;
    tensor.shape = is_flat ? shape->second : stored.shape();
    tensor.fragments = tensor.replicas = FragmentList(tensor.shape.rank());
    if (!is_flat) {
      tensor.fragments.add(stored);
    } else if (volume(tensor.shape) != stored.shape()[0] || (stored.shape()[0] > 1 && stored.strides[0] != 1)) {
      return corrupt(catalog_.file_path(stored.extent.file) + ": expected the numbers of " + to_string(tensor.shape) +
                     ", as param_shapes has it, got " + to_string(stored.shape()));
    } else {
      for (const Fragment& fragment : fragments_of_run(tensor.shape, 0, volume(tensor.shape), stored, 0))
        tensor.fragments.add(fragment);
    }
    if (state.name != kMasterFile) {
      weight.states.push_back(std::move(tensor));
      continue;
    }
    weight.master = std::move(tensor);
    has_masters_ = true;
  }
  for (const std::string& parameter : universal_)
    if (!weights_[parameter].master)
      return io_error(catalog_.root + ": missing '" + printable(universal_path(parameter)) + "/fp32.pt'");
  optimizer_ = "a universal checkpoint";
  const std::string options = set_.directory + std::string(kUniversalDirectory) + "/optimizer_state.pt";
  if (!path_exists(path_join(catalog_.root, options))) return {};
  const auto read = TRY(read_files<std::vector<ParameterGroup>>(
      {options}, [&](const File& file, const std::string&, std::uint32_t) -> Result<std::vector<ParameterGroup>> {
        const TorchFile content = TRY(TorchFile::open(file, 0, TRY(file.size())));
        const auto list = content.root().find("param_groups");
        if (!list) return std::vector<ParameterGroup>();
        return read_parameter_groups(*list, left_out_);
      }));
  for (std::size_t g = 0; g < read[0].size(); ++g) {
    std::vector<std::string> names;
    const std::set<Index> ids(read[0][g].ids.begin(), read[0][g].ids.end());
    for (const Index id : ids)
      if (id >= 0 && id < std::ssize(groups)) {
        const auto& of = groups[static_cast<std::size_t>(id)];
        names.insert(names.end(), of.begin(), of.end());
      }
    TRY(add_parameter_group(g, read[0][g], model_files_.begin()->second, names));
  }
  return {};
}

// Without ZeRO the optimizer is torch's own, in the model states: its states are numbered.
Status DeepspeedReader::read_plain_optimizer() {
  const auto root = first_file_->root();
  const auto optimizer = root->find("optimizer");
  if (!optimizer || optimizer->kind() != pickle::Kind::kDict || set_.is_universal) return {};
  const std::uint32_t file = model_files_.begin()->second;
  const auto groups = optimizer->find("param_groups");
  std::vector<ParameterGroup> options;
  if (groups) options = TRY(read_parameter_groups(*groups, left_out_));
  std::map<Index, std::vector<const TensorFile::Entry*>> states;
  for (const TensorFile::Entry& entry : first_file_->tensors()) {
    if (entry.path.size() != 4 || entry.path[0] != KeyPath::value_type("optimizer") ||
        entry.path[1] != KeyPath::value_type("state"))
      continue;
    const auto* text = std::get_if<std::string>(&entry.path[2]);
    const auto id = text ? as_number(*text) : std::nullopt;
    if (id) states[*id].push_back(&entry);
  }
  std::vector<std::vector<Index>> ids_of_groups;
  std::set<Index> ids;
  for (const ParameterGroup& group : options) {
    if (!group.ids.empty()) ids_of_groups.push_back(group.ids);
    ids.insert(group.ids.begin(), group.ids.end());
  }
  for (const auto& [id, entries] : states) ids.insert(id);
  if (ids.empty() && optimizer->size() > 0)
    warn("The optimizer's states are not read: they are not as torch's optimizers number them (FP16_Optimizer's?)");
  if (ids.empty()) return {};
  std::vector<ParameterId> wanted;
  for (const Index id : ids) {
    ParameterId& to = wanted.emplace_back();
    to.id = id;
    to.is_fresh = !states.contains(id);
    if (!to.is_fresh)
      for (const TensorFile::Entry* entry : states.at(id))
        if (entry->tensor.shape().rank() > 0) to.shape = entry->tensor.shape();
  }
  std::vector<NamedShape> parameters;  // in the model's order, tied ones once
  std::set<std::pair<Index, Index>> places;
  for (const NamedTensor& entry : first().module) {
    const StoredTensor& t = entry.tensor;
    if (first().buffers.contains(entry.name)) continue;
    if (volume(t.shape()) > 0 && !places.emplace(t.extent.offset, t.start).second) continue;
    parameters.push_back({entry.name, t.shape()});
  }
  const ParameterNames named = name_parameters(parameters, NameOrder::kAsDefined, wanted, ids_of_groups);
  if (named.names.empty()) {
    warn("The optimizer's states are not read: " + named.evidence);
    return {};
  }
  std::map<Index, std::string> name_of;
  for (std::size_t i = 0; i < wanted.size(); ++i) name_of[wanted[i].id] = named.names[i];
  for (const auto& [id, entries] : states) {
    Weight& weight = weights_.at(name_of.at(id));
    for (const TensorFile::Entry* entry : entries) {
      Tensor state;
      state.name = std::get<std::string>(entry->path[3]);
      state.dtype = entry->tensor.dtype;
      state.shape = entry->tensor.shape();
      state.fragments = state.replicas = FragmentList(state.shape.rank());
      state.fragments.add(in_file(entry->tensor, file));
      weight.states.push_back(std::move(state));
    }
  }
  for (std::size_t g = 0; g < options.size(); ++g) {
    std::vector<std::string> names;
    for (const Index id : options[g].ids) names.push_back(name_of.at(id));
    TRY(add_parameter_group(g, options[g], file, names));
  }
  return {};
}

// ---- What is in the catalog

// Another name of a parameter has its numbers, where the file has none of its own.
Status DeepspeedReader::resolve_shared() {
  for (const auto& [alias, name] : shared_) {
    const auto source = weights_.find(name);
    if (source == weights_.end() || alias == name)
      return corrupt(catalog_.root + ": shared_params: '" + printable(alias) + "' is another name of '" +
                     printable(name) + "', which is not there");
    Weight& weight = weights_[alias];
    if (!weight.stored) weight.stored = source->second.stored;
    if (!weight.master) weight.master = source->second.master;
    if (!weight.computes) weight.dtype = source->second.dtype;
    weight.computes = weight.computes || source->second.computes;
  }
  return {};
}

// Of a pipeline's parameters, whose names are those of its layers.
std::map<std::string, std::string> DeepspeedReader::plain_names() {
  if (first().has_module) return {};
  std::map<std::string, Dims> shapes;
  for (const auto& [name, weight] : weights_)
    if (const auto& any = weight.stored ? weight.stored : weight.master) shapes.emplace(name, any->shape);
  PipelineNames names = name_pipeline(shapes);
  if (!names.evidence.empty()) catalog_.attributes.emplace_back("pipeline", names.evidence);
  return std::move(names.names);
}

Status DeepspeedReader::finish_weights(Weights wanted) {
  if (wanted == Weights::kMaster && !has_masters_)
    return usage_error(catalog_.root + ": --weights master: there are none, as " +
                       (set_.optimizers.empty() ? "the files of optimizer states are not there"
                                                : "the optimizer keeps no second copy"));
  const std::map<std::string, std::string> plain = plain_names();
  for (auto& [name, weight] : weights_) {
    const bool takes_master = weight.master && (wanted == Weights::kMaster || !weight.stored);
    if (!takes_master && !weight.stored)
      return corrupt(catalog_.root + ": " + tensor_text(name) +
                     ": a placeholder of ZeRO 3, and no rank's file has numbers of it");
    const auto named = plain.find(name);
    const std::string key = named == plain.end() ? std::string() : named->second;
    Tensor model = takes_master ? *weight.master : *weight.stored;
    if (takes_master && wanted == Weights::kModel && weight.computes && weight.dtype != model.dtype)
      model.model_dtype = weight.dtype;
    model.name = name;
    model.path = {name};
    model.plain_key = key;
    model.is_buffer = first().buffers.contains(name);
    TRY(catalog_.add(std::move(model)).context(catalog_.root));
    if (shared_.contains(name)) continue;
    if (weight.master && wanted == Weights::kModel) weight.states.push_back(std::move(*weight.master));
    for (Tensor& state : weight.states) {
      state.path = {"optimizer", "state", name, state.name};
      if (!key.empty()) state.plain_key = "optimizer.state." + key + "." + state.name;
      state.name = "optimizer.state." + name + "." + state.name;
      TRY(catalog_.add(std::move(state)).context(catalog_.root));
    }
    for (const auto& [state, pickled] : weight.values) {
      TRY(add_pickled("optimizer.state." + name + "." + state, {"optimizer", "state", name, state}, 0, pickled));
      if (!key.empty()) catalog_.blobs.back().plain_key = "optimizer.state." + key + "." + state;
    }
  }
  return {};
}

// What else the first rank's model states hold: schedulers, counters, what the user gave.
Status DeepspeedReader::add_extra() {
  static const std::set<std::string, std::less<>> kOwn = {"module",
                                                          "buffer_names",
                                                          "optimizer",
                                                          "param_shapes",
                                                          "shared_params",
                                                          "frozen_param_shapes",
                                                          "dp_world_size",
                                                          "frozen_param_fragments",
                                                          "mp_world_size",
                                                          "ds_config",
                                                          "ds_version",
                                                          "checkpoint_parallel_dimensions",
                                                          "num_experts",
                                                          "ds_autoep_layers",
                                                          "sparse_tensor_module_names",
                                                          "universal_checkpoint_info"};
  const auto is_extra = [&](const KeyPath& path) {
    const auto* name = path.empty() ? nullptr : std::get_if<std::string>(&path[0]);
    return name && !kOwn.contains(*name);
  };
  const auto below = [](const KeyPath& path) {
    KeyPath out = {"extra_state"};
    out.insert(out.end(), path.begin(), path.end());
    return out;
  };
  const std::uint32_t file = model_files_.begin()->second;
  for (const TensorFile::Entry& entry : first_file_->tensors())
    if (is_extra(entry.path)) TRY(add_tensor("extra_state." + entry.name, below(entry.path), file, entry.tensor));
  for (const TensorFile::Object& object : first_file_->objects()) {
    if (!is_extra(object.path) || object.value.is_none()) continue;
    pickle::PickleWriter w;
    if (pickle::write_value(w, object.value))
      TRY(add_object("extra_state." + object.name, below(object.path), file, object.value));
    else
      left_out_.insert("extra_state." + object.name);
  }
  return {};
}

void DeepspeedReader::describe_run(Weights wanted) {
  catalog_.attributes.emplace_back("format",
                                   "DeepSpeed" + (first().version.empty() ? std::string() : " " + first().version));
  std::string text = optimizer_ + ", " + count_of(ranks_, "data-parallel rank");
  if (!set_.layers.empty()) text += ", " + count_of(parts(), "pipeline stage");
  if (first().steps) text += ", step " + with_commas(*first().steps);
  catalog_.attributes.emplace_back("saved", text);
  if (has_masters_)
    catalog_.attributes.emplace_back("weights", wanted == Weights::kMaster
                                                    ? "the optimizer's float32 masters"
                                                    : "as the model computes with them; --weights master takes the "
                                                      "optimizer's float32 masters");
}

Status DeepspeedReader::open(const std::string& path, const OpenOptions& options) {
  set_ = TRY(find_files(path));
  catalog_.root = set_.root;
  if (!set_.latest.empty()) catalog_.metadata_files.push_back(set_.latest);
  for (const std::string_view script : kScripts)
    if (path_exists(path_join(catalog_.root, script))) catalog_.metadata_files.emplace_back(script);
  for (const std::string_view model : kModelFiles)
    if (path_exists(path_join(catalog_.root, model)))
      catalog_.notes.push_back(
          "A model in Hugging Face's files lies beside DeepSpeed's state, which is what is read; " +
          std::string(model) + " can be opened by its own path.");
  TRY(read_models(options));
  TRY(read_optimizers());
  TRY(join_frozen());
  TRY(resolve_shared());
  TRY(finish_weights(options.weights));
  TRY(add_extra());
  describe_run(options.weights);
  if (!set_.unread.empty())
    warn("Not read, as states of experts without ZeRO are not known: " + names_text(set_.unread, "file"));
  if (!left_out_.empty())
    warn("Not read, as they are no plain data: " +
         names_text(std::vector<std::string>(left_out_.begin(), left_out_.end()), "object"));
  return finish(options);
}

}  // namespace

Result<std::unique_ptr<Reader>> open(const std::string& path, const OpenOptions& options) {
  auto reader = std::make_unique<DeepspeedReader>();
  TRY(reader->open(path, options));
  return std::unique_ptr<Reader>(std::move(reader));
}

}  // namespace reshard::deepspeed
