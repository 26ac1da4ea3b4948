// SPDX-License-Identifier: Apache-2.0
// Lays out per-rank files: --ckpt-format torch with a plain optimizer (read by legacy_reader.cc).
#include <algorithm>
#include <cstdio>
#include <map>
#include <span>

#include "formats/encoding/pickle_writer.h"
#include "formats/encoding/torch_archive.h"
#include "formats/megatron/megatron.h"
#include "formats/megatron/names.h"
#include "formats/megatron/written_model.h"
#include "formats/tensor_files/local_files.h"
#include "lib/base/text.h"
#include "lib/layout/stages.h"

namespace reshard::megatron {
namespace {

using pickle::PickleWriter;

// A parameter of the whole model and its optimizer states, as tensors of the request.
struct WholeParameter {
  std::string name;  // with global numbers of layers and experts
  CoreName core;
  Cut cut;
  Index stage = 0;
  std::size_t weight = 0;
  std::map<std::string, std::size_t, std::less<>> states;  // by suffix
};

// A parameter in a rank's file.
struct RankParameter {
  std::string name;  // with numbers that start at 0 on each rank
  const WholeParameter* whole = nullptr;
  Index ndim = 0;
  std::size_t weight = 0;                                  // index into the tensors of the file
  std::map<std::string, std::size_t, std::less<>> states;  // by suffix
};

std::string rank_directory(Index tp, Index stage, Index ep, const WrittenModel& model) {
  char text[64];
  std::snprintf(text, sizeof text, "mp_rank_%02lld", static_cast<long long>(tp));
  std::string out = text;
  for (const auto& [rank, ranks] : {std::pair(stage, model.pp), std::pair(ep, model.ep)}) {
    if (ranks == 1) continue;
    std::snprintf(text, sizeof text, "_%03lld", static_cast<long long>(rank));
    out += text;
  }
  return out;
}

// Returns the keys of the modules' extra states, "decoder.layers.0.mlp.linear_fc1._extra_state", whose values are
// empty.
std::vector<std::string> extra_states(const std::vector<RankParameter>& parameters, const Modules& modules,
                                      bool has_head) {
  std::vector<std::string> out;
  for (const RankParameter& p : parameters) {
    const std::string module = p.name.substr(0, p.name.rfind('.'));
    const std::string_view own = std::string_view(module).substr(module.rfind('.') + 1);
    if (!own.starts_with("linear_") || p.ndim < 2) continue;
    std::string state = module + "._extra_state";
    if (out.empty() || out.back() != state) out.push_back(std::move(state));  // the experts of a module share one
    if (own == "linear_qkv" && modules.norms_inside)
      out.push_back(module.substr(0, module.size() - own.size()) + "core_attention._extra_state");
  }
  if (has_head) out.emplace_back("output_layer._extra_state");
  return out;
}

class RankFiles {
 public:
  // Both must outlive this object.
  RankFiles(LayoutRequest& request, WrittenModel& model, const Modules& modules)
      : request_(request), model_(model), modules_(modules) {}
  Result<std::unique_ptr<Target>> lay_out();

 private:
  Status check() const;
  Status find_parameters();
  Result<Cut> cut_for(const TargetTensor& tensor, const std::string& name) const;
  Status add_file(LocalFiles& files, Index stage, Index tp, Index ep) const;
  LocalTensor local(std::size_t tensor, const Cut& cut, Index tp) const;
  Result<torch_archive::Content> content(const std::vector<LocalTensor>& tensors,
                                         const std::vector<RankParameter>& parameters, Index stage) const;
  Status write_content(PickleWriter& w, const std::vector<LocalTensor>& tensors,
                       const std::vector<RankParameter>& parameters, Index stage,
                       std::vector<std::string>& storages) const;
  Status write_optimizer(PickleWriter& w, OptimizerScope of, const std::vector<LocalTensor>& tensors,
                         const std::vector<RankParameter>& parameters, std::vector<std::string>& storages) const;

  LayoutRequest& request_;
  WrittenModel& model_;
  Modules modules_;
  std::vector<WholeParameter> parameters_;  // in the model's order
};

Status RankFiles::check() const {
  const Index tp = model_.tp, heads = *model_.args.number("num_attention_heads"),
              groups = *model_.args.number("num_query_groups");
  if (heads % tp != 0 || (groups % tp != 0 && tp % groups != 0))
    return unsupported("tp=" + std::to_string(tp) + " does not divide " + count_of(heads, "attention head") + " and " +
                       count_of(groups, "key-value head") + ", which Megatron requires");
  for (std::size_t i = 0; model_.run && i < request_.tensors.size(); ++i) {
    const TargetTensor& t = request_.tensors[i];
    if (model_.parts[i].key.kind == StateKind::kModel && t.dtype != DType::kBFloat16 && t.dtype != DType::kFloat16)
      return unsupported(tensor_text(t.name) + " is " + std::string(info(t.dtype).torch_name) +
                         ": an optimizer with masters needs weights in bfloat16 or float16; add --dtype bfloat16 "
                         "to convert them, or --exclude 'optim*' to leave the optimizer out");
  }
  return {};
}

Result<Cut> RankFiles::cut_for(const TargetTensor& tensor, const std::string& name) const {
  if (model_.tp == 1) return Cut{};
  const auto cut = cut_of(name, true);
  if (!cut) return unsupported(tensor_text(tensor.name) + ": reshard does not know how tensor parallelism cuts it");
  if (!local_shape(*cut, tensor.shape, model_.tp))
    return unsupported(tensor_text(tensor.name) + " " + to_string(tensor.shape) + ": tp=" + std::to_string(model_.tp) +
                       " does not divide it");
  return *cut;
}

// Collects the parameters under the names of the modules and gives these names to the request's tensors.
Status RankFiles::find_parameters() {
  std::map<std::string, WholeParameter> found;
  for (std::size_t i = 0; i < request_.tensors.size(); ++i) {
    TargetTensor& t = request_.tensors[i];
    const auto& [key, core] = model_.parts[i];
    const std::string name = name_in(modules_, key.parameter, model_.experts > 0);
    t.name = key.prefix + name + key.suffix;
    WholeParameter& p = found[name];
    if (key.kind == StateKind::kModel) {
      p.name = name;
      p.core = parse_core_name(name);
      p.cut = TRY(cut_for(t, name));
      p.weight = i;
      p.stage = core.layer                           ? *core.layer / (model_.layers / model_.pp)
                : key.parameter.starts_with("embed") ? 0
                                                     : model_.pp - 1;
    } else {
      p.states.emplace(key.suffix, i);
    }
  }
  for (const auto& [name, p] : found)
    for (const auto& [suffix, i] : p.states)
      if (request_.tensors[i].shape != request_.tensors[p.weight].shape)
        return unsupported(tensor_text(request_.tensors[i].name) + ": expected the shape of its parameter, " +
                           to_string(request_.tensors[p.weight].shape) + ", got " +
                           to_string(request_.tensors[i].shape));
  const bool is_tied = !model_.args.flag("untie_embeddings_and_output_weights");
  const std::string embedding(kEmbedding), head(kHead);
  if (is_tied && model_.pp > 1 && !found.contains(head)) {  // the last stage has a copy of the embedding
    WholeParameter copy = found.at(embedding);
    copy.name = head;
    copy.core = parse_core_name(head);
    copy.stage = model_.pp - 1;
    found.emplace(head, std::move(copy));
  }
  std::vector<std::string> names;
  for (const auto& [name, p] : found) names.push_back(name);
  for (const std::string& name : in_model_order(names, modules_)) parameters_.push_back(std::move(found.at(name)));
  return {};
}

LocalTensor RankFiles::local(std::size_t tensor, const Cut& cut, Index tp) const {
  const TargetTensor& t = request_.tensors[tensor];
  const Index ranks = cut.dim < 0 ? 1 : model_.tp;
  LocalTensor out{t.name, t.dtype, *local_shape(cut, t.shape, ranks), {}};
  for (const LocalBox& part : parts_of_rank(cut, out.shape, ranks > 1 ? tp : 0, ranks))
    out.parts.push_back({tensor, part});
  return out;
}

Status RankFiles::add_file(LocalFiles& files, Index stage, Index tp, Index ep) const {
  const Index first_layer = stage * (model_.layers / model_.pp), experts = model_.experts / model_.ep;
  std::vector<RankParameter> parameters;
  std::vector<LocalTensor> tensors;
  for (const WholeParameter& whole : parameters_) {
    if (whole.stage != stage || (whole.core.is_expert() && *whole.core.expert / experts != ep)) continue;
    CoreName core = whole.core;
    if (core.layer) *core.layer -= first_layer;
    if (core.is_expert()) *core.expert -= ep * experts;
    RankParameter p{core.text(), &whole, request_.tensors[whole.weight].shape.rank(), tensors.size(), {}};
    tensors.push_back(local(whole.weight, whole.cut, tp));
    parameters.push_back(std::move(p));
  }
  for (RankParameter& p : parameters)
    for (const auto& [suffix, i] : p.whole->states) {
      p.states.emplace(suffix, tensors.size());
      tensors.push_back(local(i, p.whole->cut, tp));
    }
  const std::string file = model_.directory() + rank_directory(tp, stage, ep, model_) + "/" + std::string(kModelFile);
  return files.add_archive(file, tensors, TRY(content(tensors, parameters, stage)));
}

void append_stored(PickleWriter& w, const std::vector<LocalTensor>& tensors, std::size_t i) {
  torch_archive::append_tensor(w, tensors[i].dtype, tensors[i].shape, std::to_string(i));
}

// Writes the dict of Float16OptimizerWithFloat16Params, described in legacy_reader.h.
Status RankFiles::write_optimizer(PickleWriter& w, OptimizerScope of, const std::vector<LocalTensor>& tensors,
                                  const std::vector<RankParameter>& parameters,
                                  std::vector<std::string>& storages) const {
  std::vector<std::vector<const RankParameter*>> groups(of == OptimizerScope::kExperts ? 1 : 2);
  for (const RankParameter& p : parameters)
    if (of == OptimizerScope::kAll || p.whole->core.is_expert() == (of == OptimizerScope::kExperts))
      groups[p.ndim >= 2 ? 0 : groups.size() - 1].push_back(&p);
  const bool has_own_steps = !modules_.norms_inside;  // torch's Adam has a step for each parameter, others for a group
  const auto step = static_cast<float>(model_.run->step());
  std::vector<std::vector<Index>> ids(groups.size());
  Index count = 0;
  pickle::Dict out(w);
  {
    pickle::Dict optimizer(out.key("optimizer"));
    optimizer.key("state").empty_dict();
    pickle::ElementRuns states(w, &PickleWriter::set_items);
    for (std::size_t g = 0; g < groups.size(); ++g)
      for (const RankParameter* p : groups[g]) {
        ids[g].push_back(count);
        states.next();
        w.integer(count++);
        pickle::Dict state(w);
        if (has_own_steps) {
          torch_archive::append_tensor(state.key("step"), DType::kFloat32, {},
                                       std::to_string(tensors.size() + storages.size()));
          storages.emplace_back(reinterpret_cast<const char*>(&step), sizeof step);
        }
        for (const std::string_view suffix : {kMomentSuffix, kSecondMomentSuffix})
          append_stored(state.key(suffix.substr(1)), tensors, p->states.find(suffix)->second);
      }
    states.end();
    TRY(model_.run->write_groups(optimizer, of, ids, !has_own_steps));
  }
  const pickle::List all_masters(out.key("fp32_from_fp16_params"));
  for (const auto& group : groups) {
    w.empty_list();
    pickle::ElementRuns masters(w, &PickleWriter::append_items);
    for (const RankParameter* p : group) {
      masters.next();
      append_stored(w, tensors, p->states.find(kMasterSuffix)->second);
    }
    masters.end();
  }
  return {};
}

Status RankFiles::write_content(PickleWriter& w, const std::vector<LocalTensor>& tensors,
                                const std::vector<RankParameter>& parameters, Index stage,
                                std::vector<std::string>& storages) const {
  pickle::Dict out(w);
  model_.args.write(out.key("args"));
  out.number("checkpoint_version", 3.0);
  out.key("model").empty_ordered_dict();
  pickle::ElementRuns entries(w, &PickleWriter::set_items);
  for (const RankParameter& p : parameters) {
    entries.next();
    w.text(p.name);
    append_stored(w, tensors, p.weight);
  }
  for (const std::string& name : extra_states(parameters, modules_, stage == model_.pp - 1)) {
    entries.next();
    w.text(name);
    w.none();
  }
  entries.end();
  if (!model_.run) return {};
  TRY(model_.run->write_progress(out));
  out.key("optimizer");
  if (!model_.shares_experts()) return write_optimizer(w, OptimizerScope::kAll, tensors, parameters, storages);
  const pickle::List optimizers(w);
  for (const OptimizerScope of : {OptimizerScope::kDense, OptimizerScope::kExperts})
    TRY(write_optimizer(w, of, tensors, parameters, storages));
  return {};
}

Result<torch_archive::Content> RankFiles::content(const std::vector<LocalTensor>& tensors,
                                                  const std::vector<RankParameter>& parameters, Index stage) const {
  torch_archive::Content out;
  PickleWriter w;
  TRY(write_content(w, tensors, parameters, stage, out.storages));
  out.pickle = std::move(w).finish();
  return out;
}

Result<std::unique_ptr<Target>> RankFiles::lay_out() {
  TRY(check());
  TRY(find_parameters());
  LocalFiles files(request_);
  for (Index stage = 0; stage < model_.pp; ++stage)
    for (Index tp = 0; tp < model_.tp; ++tp)
      for (Index ep = 0; ep < model_.ep; ++ep) TRY(add_file(files, stage, tp, ep));
  files.target().add_text(std::string(kLatestFile), model_.latest());
  return std::move(files).finish();
}

}  // namespace

Result<std::unique_ptr<Target>> lay_out_rank_files(LayoutRequest request, const Modules& modules) {
  WrittenModel model = TRY(WrittenModel::read(request));
  TRY(check_stages(StageRule::kEven, model.layers, model.pp));
  const bool is_own = !modules.norms_inside;
  model.args.set("ckpt_format", "torch");
  model.args.set("transformer_impl", is_own ? "local" : "transformer_engine");
  if (model.run) model.args.set("use_distributed_optimizer", false);
  if (model.experts > 0) {
    model.args.set("expert_tensor_parallel_size", model.tp);
    model.args.set("moe_grouped_gemm", !is_own);
  }
  return RankFiles(request, model, modules).lay_out();
}

}  // namespace reshard::megatron
