// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/reader.h"

#include <algorithm>
#include <array>

#include "formats/deepspeed/pipeline_names.h"
#include "formats/encoding/pickle_writer.h"
#include "formats/tensor_files/flat_runs.h"
#include "lib/base/names.h"
#include "lib/base/text.h"

namespace reshard::deepspeed {
namespace {

// The script that DeepSpeed copies next to its checkpoints.
constexpr std::array<std::string_view, 2> kScripts = {"zero_to_fp32.py", "zero_to_torch.py"};
// The files that the Trainer and Accelerate save next to the engine's directory.
constexpr std::array<std::string_view, 4> kModelFiles = {"model.safetensors", "model.safetensors.index.json",
                                                         "pytorch_model.bin", "pytorch_model.bin.index.json"};

}  // namespace

// ---- The model

Status DeepspeedReader::read_models(const OpenOptions& options) {
  TRY(check_models(set_, parts()));
  auto it = set_.models.begin();  // the first that can be read
  std::optional<OpenFile> opened;
  for (; it != set_.models.end() && !opened; ++it) opened = TRY(open_if_whole(it->second, options));
  if (!opened) return corrupt(catalog_.root + ": no model states can be read");
  const OpenFile& open = *opened;
  const auto& [key, name] = *std::prev(it);
  first_file_ = open.content;
  models_.emplace(key, TRY(read_model_states(*open.content, catalog_.file_path(open.file))));
  model_files_.emplace(key, open.file);
  const Index told = first().mp_ranks.value_or(1);
  if (told > kMaxMeshRanks)
    return corrupt(catalog_.file_path(open.file) + ": mp_world_size: " + with_commas(told) + " are too many");
  TRY(check_models(set_, std::max(parts(), told)));

  std::vector<std::pair<Index, Index>> keys;
  std::vector<std::string> names;
  for (; it != set_.models.end(); ++it) {
    keys.push_back(it->first);
    names.push_back(it->second);
  }
  const auto base = static_cast<std::uint32_t>(catalog_.files.size());
  auto others = TRY(read_files<ModelStates>(names, [&](const File& file, std::uint32_t number) -> Result<ModelStates> {
    ModelStates out = TRY(read_model_states(TRY(TensorFile::open(file)), file.path()));
    if (keys[number - base].second > 0) {  // values that are equal on all ranks are kept of the first rank only
      out.groups.reset();
      std::erase_if(out.module,
                    [&](const NamedTensor& t) { return t.tensor.shape() == Dims{0} && !out.buffers.contains(t.name); });
    }
    return out;
  }));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (!others[i]) continue;
    if (others[i]->steps != first().steps)
      return corrupt(path_join(catalog_.root, names[i]) + ": global_steps is " +
                     (others[i]->steps ? std::to_string(*others[i]->steps) : "missing") + ", and " +
                     (first().steps ? std::to_string(*first().steps) : "missing") + " in " + name +
                     ": files of two steps; copy those of one save");
    model_files_.emplace(keys[i], base + static_cast<std::uint32_t>(i));
    models_.emplace(keys[i], *std::move(others[i]));
  }
  TRY(find_parts());
  if (set_.is_universal)
    for (const DirectoryEntry& e :
         TRY(list_directory(path_join(catalog_.root, set_.directory + std::string(kUniversalDirectory)))))
      if (e.is_directory) universal_.insert(e.name);
  for (const auto& [number, states] : models_) {
    if (number.second <= 0) shared_.insert(states.shared.begin(), states.shared.end());
    TRY(add_module(states, model_files_.at(number), number.first % tensor_ranks_));
  }
  return read_module_files();
}

// Finds the number of tensor-parallel ranks and, for AutoTP, how their parts join.
Status DeepspeedReader::find_parts() {
  if (set_.is_universal) return {};
  if (!set_.layers.empty()) {
    tensor_ranks_ = set_.layer_ranks();
    if (parts() % tensor_ranks_ != 0)
      return corrupt(catalog_.root + ": files of " + count_of(tensor_ranks_, "tensor-parallel rank") + " for each " +
                     "layer, and " + count_of(parts(), "file") + " of model states: files of two saves");
    return check_layers(set_);
  }
  tensor_ranks_ = parts();
  if (tensor_ranks_ == 1) return {};
  const auto refuse = [&](const std::string& why) {
    return unsupported(catalog_.root + ": model states of " + count_of(tensor_ranks_, "tensor-parallel rank") +
                       ", and " + why +
                       "; ds_to_universal.py makes a universal checkpoint from them, which reshard reads");
  };
  if (!first().stacked_experts.empty()) return refuse("it is unknown how they divide AutoEP's experts");
  const auto& info = first().tensor_parallel;
  if (!info) return refuse("the files do not say how their parts join");
  if (!info->unknown_patterns.empty())
    return refuse("universal_checkpoint_info has patterns that are not names ('" +
                  printable(*info->unknown_patterns.begin()) + "')");
  std::vector<std::map<std::string, Dims>> shapes(tensor_ranks_);
  for (const auto& [number, states] : models_) {
    if (number.second > 0) continue;
    std::map<std::string, Dims>& own = shapes[number.first];
    if (has_rank_models() && !states.frozen_shapes.empty())
      return refuse("it is unknown how ZeRO 3 cuts frozen parameters among them");
    for (const auto& group : states.groups.value_or(std::vector<Group>()))
      for (const NamedShape& p : group) own.insert_or_assign(p.name, p.shape);
    for (const NamedTensor& t : states.module) own.emplace(t.name, t.tensor.shape());
  }
  return join_parts_of(shapes);
}

// Joins the tensor-parallel parts of each tensor. `shapes` has the shapes of each rank's parts by name, of one pipeline
// stage or of all.
Status DeepspeedReader::join_parts_of(const std::vector<std::map<std::string, Dims>>& shapes) {
  const auto& info = first().tensor_parallel;
  std::map<std::string, Dims> all;
  for (const auto& rank : shapes) all.insert(rank.begin(), rank.end());
  const PipelineNames names = info ? PipelineNames() : name_pipeline(all, families_);
  if (!info && !names.family)
    return unsupported(catalog_.root + ": layers of " + count_of(tensor_ranks_, "tensor-parallel rank") + ", and no " +
                       "known family has these layers, so it is unknown how their parts join; ds_to_universal.py " +
                       "makes a universal checkpoint from them, which reshard reads");
  for (const auto& [name, shape] : all) {
    std::vector<Dims> parts;
    bool is_known = true;
    for (Index r = 0; r < std::ssize(shapes); ++r) {
      const auto found = shapes[r].find(name);
      if (found != shapes[r].end()) {
        parts.push_back(found->second);
        continue;
      }
      if (!is_partial())
        return corrupt(catalog_.root + ": " + tensor_text(name) + ": tensor-parallel rank " + std::to_string(r) +
                       " has no part of it");
      // The part's file cannot be read. AutoTP's parts differ in length; a pipeline's are as long as each other.
      const auto recorded = info ? info->shape_of(name, r) : std::optional(shape);
      is_known = is_known && recorded;
      parts.push_back(recorded.value_or(shape));
    }
    if (info && info->unsupported.contains(name))
      return unsupported(catalog_.root + ": " + tensor_text(name) + ": " + printable(info->unsupported.at(name)));
    PartCut cut;
    if (info && !first().buffers.contains(name)) cut = info->cut_of(name);
    if (!info) {
      const auto parsed = parse_name(*names.family, names.names.at(name));
      const TensorParallelCut by_family = parsed ? tensor_parallel_cut(*parsed) : TensorParallelCut();
      cut = {by_family.dim, by_family.sections};
    }
    if (!is_known && cut.dim >= 0) {
      unplaced_.insert(name);
      leave_out_tensor(name);
      continue;
    }
    joined_.emplace(name, TRY(join_parts(cut, parts).context(catalog_.root + ": " + tensor_text(name))));
  }
  return {};
}

// Adds the module of one file. A tensor without elements is ZeRO 3's placeholder if the parameter has elements.
Status DeepspeedReader::add_module(const ModelStates& states, std::uint32_t file, Index part) {
  for (const NamedTensor& entry : states.module) {
    const StoredTensor& tensor = entry.tensor;
    if (unplaced_.contains(entry.name)) continue;
    Weight& weight = weights_[entry.name];
    const bool is_placeholder = universal_.contains(entry.name) || (tensor.shape() == Dims{0} && has_rank_models() &&
                                                                    !states.buffers.contains(entry.name));
    const std::string what = catalog_.file_path(file) + ": " + tensor_text(entry.name);
    if (const auto joined = joined_.find(entry.name); joined != joined_.end() && !is_placeholder) {
      if (weight.stored && weight.dtype != tensor.dtype)
        return corrupt(what + ": expected " + std::string(info(weight.dtype).torch_name) + " as of other ranks, got " +
                       std::string(info(tensor.dtype).torch_name));
      Tensor own;
      own.dtype = weight.dtype = tensor.dtype;
      own.shape = tensor.shape();
      own.fragments = own.replicas = FragmentList(own.shape.rank());
      own.fragments.add(in_file(tensor, file));
      add_part(weight.stored, own, joined->second, part, true);
      weight.computes = true;
      continue;
    }
    if (weight.computes && (weight.dtype != tensor.dtype || weight.stored.has_value() == is_placeholder ||
                            (weight.stored && weight.stored->shape != tensor.shape())))
      return corrupt(what + ": expected it as in the files of other ranks, got " + type_text(tensor));
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

// Reads the files of a pipeline's layers and of experts.
Status DeepspeedReader::read_module_files() {
  std::vector<std::string> names, prefixes;
  std::vector<Index> parts;
  for (const auto& [number, name] : set_.layers) {
    names.push_back(name);
    prefixes.push_back(std::to_string(number.first) + ".");
    parts.push_back(number.second);
  }
  // AutoEP's experts have no files with ZeRO 3 and in universal checkpoints: the optimizer's states have them.
  if (first().stacked_experts.empty() || (!has_rank_models() && !set_.is_universal))
    TRY(check_experts(set_, first().experts));
  for (const auto& [number, name] : set_.experts) {
    names.push_back(name);
    prefixes.emplace_back();
    parts.push_back(0);
  }
  const auto base = static_cast<std::uint32_t>(catalog_.files.size());
  const auto contents =
      TRY(read_files<ModelStates>(names, [&](const File& file, std::uint32_t number) -> Result<ModelStates> {
        ModelStates out;
        const TensorFile content = TRY(TensorFile::open(file));
        for (const TensorFile::Entry& entry : content.tensors())
          out.module.push_back({prefixes[number - base] + entry.name, entry.tensor});
        return out;
      }));
  if (tensor_ranks_ > 1 && !set_.layers.empty()) {
    std::vector<std::map<std::string, Dims>> shapes(tensor_ranks_);
    for (std::size_t i = 0; i < set_.layers.size(); ++i)
      if (contents[i])
        for (const NamedTensor& t : contents[i]->module) shapes[parts[i]].emplace(t.name, t.tensor.shape());
    TRY(join_parts_of(shapes));
  }
  for (std::size_t i = 0; i < contents.size(); ++i)
    if (contents[i]) TRY(add_module(*contents[i], base + static_cast<std::uint32_t>(i), parts[i]));
  if (!first().has_module && set_.layers.empty() && !set_.is_universal)
    return io_error(catalog_.root +
                    ": missing the files layer_00-model_states.pt and so on, a pipeline's weights: its " +
                    "model states have none");
  return {};
}

// Joins the frozen parameters of ZeRO 3, which are divided equally among the ranks. In other stages the module has them
// whole.
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
                       to_string(joined.shape) + " as on other ranks, got " + to_string(flat.shape()));
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

// ---- What is in the catalog

// Gives aliases the values of their parameters, unless the file has values of their own.
Status DeepspeedReader::resolve_shared() {
  for (const auto& [alias, name] : shared_) {
    if (unplaced_.contains(name)) {
      leave_out_tensor(alias);
      continue;
    }
    const auto source = weights_.find(name);
    if (source == weights_.end() || alias == name)
      return corrupt(catalog_.root + ": shared_params: '" + printable(alias) + "' is another name of '" +
                     printable(name) + "', which is missing");
    Weight& weight = weights_[alias];
    if (!weight.stored) weight.stored = source->second.stored;
    if (!weight.master) weight.master = source->second.master;
    if (!weight.computes) weight.dtype = source->second.dtype;
    weight.computes = weight.computes || source->second.computes;
  }
  return {};
}

// Returns the model's names of a pipeline's parameters, which are named by layer.
std::map<std::string, std::string> DeepspeedReader::plain_names(Families families) {
  if (first().has_module) return {};
  std::map<std::string, Dims> shapes;
  for (const auto& [name, weight] : weights_)
    if (const auto& any = weight.stored ? weight.stored : weight.master) shapes.emplace(name, any->shape);
  PipelineNames names = name_pipeline(shapes, families);
  if (!names.evidence.empty()) catalog_.attributes.emplace_back("pipeline", names.evidence);
  return std::move(names.names);
}

Status DeepspeedReader::finish_weights(Weights wanted, Families families) {
  if (wanted == Weights::kMaster && !has_masters_)
    return usage_error(catalog_.root + ": --weights master: there are no masters, because " +
                       (!set_.optimizers.empty()   ? "the optimizer has no second copy of the weights"
                        : catalog_.lacks_optimizer ? "the files of optimizer states are missing"
                                                   : "only those that ZeRO and BF16_Optimizer save are read"));
  const std::map<std::string, std::string> plain = plain_names(families);
  for (auto& [name, weight] : weights_) {
    const bool takes_master = weight.master && (wanted == Weights::kMaster || !weight.stored);
    // A file that cannot be read has the weight, and with ZeRO 3 masters too.
    const bool is_gone = is_partial() && !weight.stored &&
                         (!weight.master || (wanted == Weights::kModel && !has_rank_models() && !set_.is_universal));
    if (!takes_master && !is_gone && !weight.stored)
      return corrupt(catalog_.root + ": " + tensor_text(name) +
                     ": a placeholder of ZeRO 3, and no rank's file has numbers of it");
    const auto named = plain.find(name);
    const std::string key = named == plain.end() ? std::string() : named->second;
    Tensor model = takes_master ? *weight.master : weight.stored.value_or(Tensor());
    if (takes_master && wanted == Weights::kModel && weight.computes && weight.dtype != model.dtype) {
      model.model_dtype = weight.dtype;
      rounded_to_ = weight.dtype;
    }
    model.name = name;
    model.path = {name};
    model.plain_key = key;
    model.is_buffer = first().buffers.contains(name);
    if (is_gone)
      leave_out_tensor(name);
    else
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

// Adds the other values in the first rank's model states: schedulers, counters, and what the user added.
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
  std::string text = (optimizer_.empty() ? "" : optimizer_ + ", ") + count_of(ranks_, "data-parallel rank");
  if (!set_.layers.empty()) text += ", " + count_of(parts() / tensor_ranks_, "pipeline stage");
  if (tensor_ranks_ > 1) text += ", " + count_of(tensor_ranks_, "tensor-parallel rank");
  if (first().steps) text += ", step " + with_commas(*first().steps);
  catalog_.attributes.emplace_back("saved", text);
  if (!has_masters_) return;
  std::string weights = "the optimizer's float32 masters";
  if (rounded_to_)
    weights += "; converted to the model's " + std::string(info(*rounded_to_).torch_name) + " unless --weights master";
  else if (wanted == Weights::kModel)
    weights = "as the model computes with them; --weights master takes " + weights;
  catalog_.attributes.emplace_back("weights", std::move(weights));
}

Status DeepspeedReader::open(const PathSnapshot& place, const OpenOptions& options) {
  const Status done = read(place, options);
  std::vector<std::string> names;
  for (const auto* files : {&set_.models, &set_.optimizers, &set_.layers, &set_.experts})
    for (const auto& [number, name] : *files) names.push_back(name);
  const std::string universal = set_.directory + std::string(kUniversalDirectory);
  if (is_partial() && set_.is_universal)
    for (const Node& node : TRY(list_tree(path_join(catalog_.root, universal))))
      if (!node.is_directory()) names.push_back(path_join(universal, node.name));
  TRY(find_more_damaged(names));
  return done;
}

Status DeepspeedReader::read(const PathSnapshot& place, const OpenOptions& options) {
  set_ = TRY(find_files(place));
  families_ = Families(options.own_family);
  catalog_.root = set_.root;
  catalog_.latest_file = set_.latest;
  for (const std::string_view script : kScripts)
    if (place.has_file(script)) catalog_.metadata_files.emplace_back(script);
  for (const std::string_view model : kModelFiles)
    if (place.has_file(model))
      catalog_.notes.push_back("There is also a model in Hugging Face's files; DeepSpeed's state is read, " +
                               std::string(model) + " can be opened by its path.");
  if (!set_.other_models.empty())
    warn(
        "This is the last of several models that Accelerate saved here. To open another, add its directory to the "
        "path: " +
        reshard::join(set_.other_models, ", "));
  TRY(read_models(options));
  TRY(read_optimizers());
  TRY(join_frozen());
  TRY(resolve_shared());
  TRY(finish_weights(options.weights, Families(options.own_family)));
  TRY(add_extra());
  describe_run(options.weights);
  if (!set_.unread.empty())
    warn("Not read, because states of experts without ZeRO are not supported: " + names_text(set_.unread, "file"));
  if (!left_out_.empty())
    warn("Not read, because they are not plain data: " +
         names_text(std::vector<std::string>(left_out_.begin(), left_out_.end()), "object"));
  return finish(options);
}

}  // namespace reshard::deepspeed
