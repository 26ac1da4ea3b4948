// SPDX-License-Identifier: Apache-2.0
#include "lib/convert/view/translation.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "lib/audit/unknown_model_audit.h"
#include "lib/base/file.h"
#include "lib/base/names.h"
#include "lib/base/shell.h"
#include "lib/base/text.h"
#include "lib/checkpoint/side_files.h"
#include "lib/checkpoint/state_key.h"
#include "lib/model/parts.h"
#include "lib/model/unknown_family.h"

namespace reshard {
namespace {

constexpr std::string_view kStackedExperts = ".experts.gate_up_proj";  // transformers 5, for every model

// Fails if --rename gives the tensors of one packed weight names that loaders do not take for one weight.
Status check_packed_names(const Catalog& source, const PackedWeights& packed) {
  const auto& tensors = source.tensors();
  if (std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.plain_key.empty(); })) return {};
  Catalog stored;
  for (Tensor t : tensors) {
    if (state_kind(t.key()) != StateKind::kModel) continue;
    t.plain_key.clear();
    TRY(stored.add(std::move(t)));
  }
  for (const PackedWeight& weight : find_packed(stored, nullptr).weights) {
    const auto renamed = [&](const PackedTensor& part) { return *source.find(stored.tensors()[part.tensor].name); };
    const PackedWeight* const there = packed.of(renamed(weight.parts.front()));
    const auto has_role = [&](const PackedTensor& part) { return there->find(part.role) == renamed(part); };
    if (there && there->packing == weight.packing && there->parts.size() == weight.parts.size() &&
        std::all_of(weight.parts.begin(), weight.parts.end(), has_role))
      continue;
    return usage_error(source.where() + ": --rename separates the parts of '" + printable(weight.name) +
                       "', which is packed as " + std::string(packing_title(weight.packing)) + " in " +
                       count_of(std::ssize(weight.parts), "tensor") +
                       "; rename its module, so that all of them get the new name");
  }
  return {};
}

// Returns whether a run that trains adapters resumes from the output: it expects the names of its own modules.
bool resumes_adapters(const Catalog& source, const Naming& naming, const Format& format) {
  const auto& tensors = source.tensors();
  return format.resumes_training() && !naming.convention &&
         std::any_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return is_adapter(t.key()); });
}

// Decides between conventions that have the same names and other row orders: an output with names of their kind keeps
// the rows. Fails (usage) for other outputs, unless the user chose one.
Status choose_row_order(const Catalog& source, const ModelChoice& choice, Convention to, Model& model) {
  if (choice.convention || !info(model.convention).has_twin) return {};
  std::vector<Convention> others = alike_conventions(*model.family, source, model.convention);
  std::erase_if(others,
                [&](Convention c) { return !info(c).has_twin || same_row_order(*model.family, model.convention, c); });
  if (others.empty()) return {};
  if (info(to).has_twin) {
    others.insert(others.begin(), model.convention);
    model.convention =
        *std::find_if(others.begin(), others.end(), [&](Convention c) { return same_row_order(*model.family, c, to); });
    return {};
  }
  std::string choices;
  others.insert(others.begin(), model.convention);
  for (const Convention c : others)
    if (!info(c).models.empty())
      choices += "\n  --source-names " + std::string(info(c).option) + " for " + std::string(info(c).models);
  return usage_error(source.where() + ": the names are " + std::string(info(model.convention).title) +
                     ", which order the rows of queries and keys in two ways, and neither names nor shapes nor " +
                     "config.json say which this is. Choose one:" + choices);
}

}  // namespace

Result<ConfigFile> read_config_file(Reader& source, const Request& wanted, ConversionNotes& notes) {
  ConfigFile out = TRY(find_config_file(source, wanted.config_path, wanted.model.families));
  if (!out.is_there() || out.is_given) return out;
  if (!TRY(out.is_of_model())) {
    notes.warnings.push_back(out.path + " has no model_type, so it does not describe a model and is ignored");
    return ConfigFile();
  }
  if (const auto real = TRY(leads_out(out.path, parent_path(out.path)))) {
    out.is_copied = false;
    notes.warnings.push_back(out.path + " is a link out of the checkpoint, to " + printable(*real) +
                             ": it is used, but not copied unless --config names it");
  }
  return out;
}

Result<Translation> translate(const Catalog& source, const ModelChoice& choice, const ConfigFile& file,
                              const Naming& naming, const Format& format) {
  std::optional<ModelConfig> said;
  if (file.is_there()) {
    auto config = file.model();
    if (!config && !choice.is_none()) return std::move(config).error();
    if (config) said = *std::move(config);
  }
  const bool is_used = said && !choice.is_none();
  Translation out;
  out.model = TRY(recognise(source, choice, is_used ? said : std::nullopt));
  if (is_used) out.float8 = said->float8;
  out.packed = find_packed(source, said ? &*said : nullptr);
  TRY(check_packed_names(source, out.packed));
  out.said = std::move(said);
  if (!out.model.family) out.model.config.reset();
  const bool changes = choice.is_none() ? naming.changed_names : format.hf_names;
  const bool keeps = naming.keep_names || resumes_adapters(source, naming, format);
  out.plain_names = !out.model.family && !keeps && changes;
  if (out.plain_names && is_used) out.foreign_prefix = foreign_prefix(source, *out.said);
  if (!out.model.family || keeps) return out;
  out.to = naming.convention;
  const std::optional<Convention> own = find_convention(format.own_names);
  if (out.to && own && out.to != own)
    return unsupported("--names: " + std::string(format.title) + ": only " + std::string(info(*own).title) +
                       " are supported");
  if (!out.to) out.to = own;
  if (!out.to && format.hf_names) out.to = Convention::kHf;
  if (!out.to && naming.common_rows) out.to = out.model.convention;
  if (!out.to) return out;
  if (!out.model.family->has_convention(*out.to))
    return unsupported("family " + std::string(out.model.family->name) + " has no " + std::string(info(*out.to).title) +
                       "; add --names keep to leave the names as they are");
  TRY(choose_row_order(source, choice, *out.to, out.model));
  out.hf_rows = naming.common_rows || !same_row_order(*out.model.family, out.model.convention, *out.to);
  return out;
}

namespace {

// Returns a clause about the prefix that all names share, which may be a trainer's or the model's own; empty if there
// is none.
std::string prefix_of_all(const std::vector<const Tensor*>& model) {
  if (model.size() < 2 || !model[0]->name.ends_with(model[0]->key())) return {};
  const std::string_view first = model[0]->key();
  const std::string_view prefix = first.substr(0, first.find('.') + 1);
  const auto begins = [&](const Tensor* t) { return t->key().starts_with(prefix); };
  if (prefix.empty() || !std::all_of(model.begin(), model.end(), begins)) return {};
  const std::string whole = model[0]->name.substr(0, model[0]->name.size() - first.size()) + std::string(prefix);
  return "; every name begins with '" + printable(whole) +
         "': if that is a wrapper around the model, remove it with --strip-prefix " + printable(whole);
}

// Returns why the names of the model's tensors belong to no family.
std::string other_names(const Catalog& source, const std::optional<ModelConfig>& config, const Family* said,
                        const std::string& config_path, const std::string& names, Families families) {
  if (said) {
    const NameAgreement agreement = compare_names(*said, source, &*config);
    return config_path + " is of family " + said->name + ", and " + agreement.text() +
           (agreement.known.empty() ? " (" + names + ")" : "");
  }
  const auto convention = convention_without_config(source, families);
  if (!convention) return "no known model family has these tensor names (" + names + ")";
  return "its tensors have " + std::string(info(*convention).title) + ", which several families share" +
         (config ? "" : "; add --config FILE to tell them apart");
}

// Returns the tensors next to the wrapped model that no known word of training states explains
// ("v_head.summary.weight" next to "pretrained_model."). A model format would leave them out although the user did not
// exclude them. If a family describes the model, its buffers are known; then only tensors that may be weights count,
// those with several floating-point elements.
std::vector<const Tensor*> beside_model(const Catalog& source, const Request& wanted, bool is_described) {
  std::vector<const Tensor*> out;
  for (const Tensor& t : source.tensors()) {
    const bool may_be_weight = t.elements() > 1 && is_floating(t.dtype);
    if (is_of_average(source, t.name)) continue;
    if (t.plain_key == "extra_state." + t.name && !any_glob_matches(wanted.selection.exclude, t.name) &&
        (may_be_weight || !is_described))
      out.push_back(&t);
  }
  return out;
}

std::string names_of(const std::vector<const Tensor*>& tensors) {
  std::vector<std::string> out;
  for (const Tensor* t : tensors) out.push_back("'" + printable(t->name) + "'");
  return some_of(out);
}

// Returns a key without the prefix of its parameter's name, if it has that.
std::string without_prefix(const std::string& key, std::string_view prefix) {
  StateKey parts = split_state_key(key);
  if (parts.parameter.starts_with(prefix)) parts.parameter.erase(0, prefix.size());
  return parts.prefix + parts.parameter + parts.suffix;
}

// Returns the part of a model's prefix that the tensors beside the model also have: "app.model." of
// "app.model.encoder.".
std::string shared_prefix(std::string prefix, const std::vector<const Tensor*>& beside) {
  const auto has_all = [&] {
    return std::ranges::all_of(beside, [&](const Tensor* t) { return t->name.starts_with(prefix); });
  };
  while (!prefix.empty() && !has_all()) {
    prefix.pop_back();
    prefix.resize(prefix.rfind('.') + 1);
  }
  return prefix;
}

// What tensors outside the recognised model are.
enum class Beside {
  kModel,          // part of it: a model's own files contain nothing else
  kProbablyModel,  // part of it: the config is of a class that has no name of what was recognised
  kTrainer,        // other state
};

// Fails if tensors are outside what was recognised as the model although they probably belong to it. In a training
// state they are only noted.
Status check_nothing_is_beside(const Catalog& source, const Request& wanted, bool is_described, Beside others,
                               ConversionNotes& notes) {
  const std::vector<const Tensor*> beside = beside_model(source, wanted, is_described);
  const auto is_model = [](const Part& part) { return part.kind == StateKind::kModel; };
  const auto model = std::find_if(source.parts.begin(), source.parts.end(), is_model);
  const bool is_only_model = std::count_if(source.parts.begin(), source.parts.end(), is_model) == 1;
  if (beside.empty() || !is_only_model || model->prefix.empty()) return {};
  const std::string what =
      "the names under '" + printable(model->prefix) + "' were taken for the model (" + model->evidence + ")";
  if (others == Beside::kTrainer) {
    notes.warnings.push_back(names_of(beside) + (beside.size() == 1 ? " is" : " are") + " left out: " + what);
    return {};
  }
  const std::string prefix = shared_prefix(model->prefix, beside);
  const std::string whole = others == Beside::kProbablyModel && !prefix.empty()
                                ? "--strip-prefix " + shell_word(prefix) + " if they are part of the model, "
                                : "";
  return unsupported(source.where() + ": " + what + ", and next to it " + (beside.size() == 1 ? "is " : "are ") +
                     names_of(beside) + ", which the output would leave out; add " + whole +
                     "--exclude to leave out tensors that are not part of the model, or --family none to write " +
                     "everything under its own names");
}

// Adds verify's findings about a model without a family as notes.
void note_unknown_model(const UnknownModelAudit& audit, const ModelConfig& config, ConversionNotes& notes) {
  const bool is_known_class = !audit.architecture.empty() && audit.unknown == 0;
  if (is_known_class)
    notes.facts.push_back("written under its own names, which match " + summary(audit, config));
  else
    notes.warnings.push_back("names, shapes and rows are the source's own: " + summary(audit, config));
  for (const Finding& f : audit.findings)
    notes.warnings.push_back((f.tensors.empty() ? "" : folded(f.tensors) + ": ") + f.what);
}

// What is known about a source whose names belong to no family.
struct Unrecognised {
  std::vector<const Tensor*> model, adapters;
  std::optional<ModelConfig> config;
  const Family* said = nullptr;  // the family that the config names; null: none, or one that is not known
  // Whether the source is a complete set of model files of no family, which may be written under its own names.
  bool has_model_names = false;

  bool is_unknown() const { return config && !said; }
};

Unrecognised look_at_unrecognised(const Catalog& source, const ConfigFile& file, Families families) {
  Unrecognised out;
  for (const Tensor& t : source.tensors()) {
    const StateKind kind = state_kind(t.key());
    if (is_adapter(t.key()) && kind != StateKind::kOptimizer) out.adapters.push_back(&t);
    if (kind == StateKind::kModel) out.model.push_back(&t);
  }
  if (file.is_there())
    if (auto parsed = file.model()) out.config = *std::move(parsed);
  out.said = out.config ? describing_family(*out.config) : nullptr;
  out.has_model_names = (source.has_model_names || (out.is_unknown() && is_config_of(source, *out.config))) &&
                        (out.said || !convention_without_config(source, families));
  return out;
}

// Returns whether the source is an adapter without the weights that it changes.
bool has_only_adapters(const Unrecognised& known) {
  const auto is_of_adapter = [](const Tensor* t) {
    return state_kind(t->key()) == StateKind::kModel && (is_adapter(t->key()) || t->key().starts_with(kPeftPrefix));
  };
  return !known.adapters.empty() && std::all_of(known.adapters.begin(), known.adapters.end(), is_of_adapter) &&
         std::all_of(known.model.begin(), known.model.end(), is_of_adapter);
}

// Returns whether the source is an adapter of PEFT's that is not LoRA's: only names say so.
bool is_other_adapter(const Unrecognised& known) {
  return known.adapters.empty() && !known.model.empty() &&
         std::all_of(known.model.begin(), known.model.end(), [](const Tensor* t) {
           return t->key().starts_with(kPeftPrefix) || t->key() == kPromptEmbeddings;
         });
}

// Returns the error for a source that is not a model under names that loaders know.
Error no_model(const Catalog& source, const Unrecognised& known, const std::string& config_path, Families families) {
  if (has_only_adapters(known) && is_megatron_adapter(known.adapters.front()->key()))
    return unsupported(source.where() + ": it contains only adapters of Megatron Bridge or NeMo (" +
                       names_of(known.adapters) + "), without the weights that they change, and reshard cannot merge " +
                       "them. Merge them with the library that trained them, and convert what it saves. Add " +
                       "--family none to write them under their own names");
  if (has_only_adapters(known))
    return unsupported(source.where() + ": it contains only adapters (" + names_of(known.adapters) +
                       "). To merge them, convert the model that they change, with --merge-adapter --adapter " +
                       shell_word(source.root) + ". Add --family none to write them under their own names");
  if (is_other_adapter(known))
    return unsupported(source.where() + ": it contains only an adapter of PEFT (" + names_of(known.model) +
                       "), of a kind that reshard does not merge. If it can be merged, do so with PEFT "
                       "(merge_and_unload) and convert " +
                       "the result. Add --family none to write it under its own names");
  if (const std::string choice = choice_of_part(source); !choice.empty())
    return unsupported(source.where() + ": " + choice);
  std::string why = "it contains no model's tensors" +
                    (known.said ? ", and " + config_path + " is of family " + known.said->name : std::string());
  if (!known.model.empty())
    why = other_names(source, known.config, known.said, config_path, names_of(known.model), families);
  if (!known.adapters.empty())
    why = "it contains adapters next to the weights they change (" + names_of(known.adapters) +
          "), which form a model only when merged (--merge-adapter)";
  return unsupported(source.where() + ": " + why + ": loaders would not recognise the output as a model. " +
                     "Add --family none to write it under its own names, --strip-prefix or --rename to change " +
                     "the names, or --family-file to describe a family" + prefix_of_all(known.model));
}

void note_stacked_experts(const Catalog& source, ConversionNotes& notes) {
  for (const Tensor& t : source.tensors())
    if (t.name.ends_with(kStackedExperts)) {
      notes.warnings.push_back(tensor_text(t.name) +
                               ": all experts in one tensor, as transformers has them in memory; " +
                               "files of most models have a tensor per expert, which other loaders expect");
      return;
    }
}

}  // namespace

Status check_names(const Catalog& source, const Translation& names, const Request& wanted, const Format& format,
                   ConfigFile& file, ConversionNotes& notes) {
  const bool claims = wanted.naming.convention.has_value() || !format.own_names.empty() ||
                      (format.hf_names && !wanted.naming.keep_names);
  if (!claims || resumes_adapters(source, wanted.naming, format)) return {};
  if (std::string doubt = doubt_about_model(source); !doubt.empty()) notes.warnings.push_back(std::move(doubt));
  const Beside others = source.has_model_names ? Beside::kModel : Beside::kTrainer;
  if (names.model.family) return check_nothing_is_beside(source, wanted, true, others, notes);
  const Families families = wanted.model.families;
  const Unrecognised known = look_at_unrecognised(source, file, families);
  const bool is_writable = known.has_model_names && !known.said && !wanted.naming.convention &&
                           known.adapters.empty() && !is_other_adapter(known) && choice_of_part(source).empty();
  if (!wanted.model.is_none() && !is_writable) return no_model(source, known, file.path, families);
  const auto audit = known.is_unknown() ? std::optional(audit_unknown_model(source, *known.config)) : std::nullopt;
  const bool is_other_class = audit && !audit->skipped.empty();
  if (!wanted.model.is_none())
    TRY(check_nothing_is_beside(source, wanted, !source.has_model_names,
                                others == Beside::kTrainer && is_other_class ? Beside::kProbablyModel : others, notes));
  if (audit) {
    note_unknown_model(*audit, *known.config, notes);
  } else {
    notes.warnings.push_back("names, shapes and rows are the source's own: nothing was compared with a model's config");
  }
  note_stacked_experts(source, notes);
  if (known.said || !known.has_model_names) {
    if (file.is_there() && !file.is_given) notes.warnings.push_back(file.path + " is not copied");
    file.is_copied = file.is_copied && file.is_given;
  }
  return {};
}

std::string Translation::target_name(const std::string& canonical, const std::string& key) const {
  if (!foreign_prefix.empty()) return without_prefix(key, foreign_prefix);
  if (!renames() || (model.convention == Convention::kHf && to == Convention::kHf)) return key;
  return rename_key(*model.family, canonical, *to);
}

}  // namespace reshard
