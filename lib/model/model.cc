// SPDX-License-Identifier: Apache-2.0
#include "lib/model/model.h"

#include <algorithm>

#include "lib/base/text.h"
#include "lib/model/class_family.h"
#include "lib/model/layer_axis.h"

namespace reshard {
namespace {

// In transformers, question answering models have the prefix "transformer." instead of "model." for most families.
bool is_named_otherwise(const Family& family, const ModelConfig& config) {
  return config.architecture.ends_with("ForQuestionAnswering") && base_prefix(family) == "model.";
}

const Family* numbered_for(const Catalog& catalog, const Family& family, Convention convention,
                           const std::optional<ModelConfig>& config) {
  return &with_axes_of(catalog, numbered(family, config ? &*config : nullptr), convention);
}

// Sets the convention that the user chose, if the names can be of it.
Status choose_convention(const Catalog& catalog, const ModelChoice& choice, Model& model) {
  if (!choice.convention || !model.family || *choice.convention == model.convention) return {};
  const auto alike = alike_conventions(*model.family, catalog, model.convention);
  if (std::find(alike.begin(), alike.end(), *choice.convention) == alike.end())
    return usage_error(catalog.where() + ": --source-names " + std::string(info(*choice.convention).option) +
                       ": the tensors have " + std::string(info(model.convention).title) + " (" +
                       std::string(info(model.convention).option) + ")");
  model.convention = *choice.convention;
  return {};
}

}  // namespace

const Family* describing_family(const ModelConfig& config) {
  const Family* family = family_of_model_type(config.model_type, config.text_model_type, config.families);
  return family && knows_quantization(*family, config) && !is_named_otherwise(*family, config) ? family : nullptr;
}

Result<Model> recognise(const Catalog& catalog, const ModelChoice& choice, std::optional<ModelConfig> config) {
  Model model{nullptr, Convention::kHf, std::move(config)};
  if (choice.is_none()) return model;
  if (!choice.detect) {
    const auto convention = detect_convention(*choice.family, catalog);
    if (!convention)
      return unsupported(catalog.where() + ": no tensor is named as in family " + std::string(choice.family->name));
    if (model.config && !choice.family->model_types.empty() &&
        !choice.family->knows_model_type(model.config->model_type))
      return usage_error(model.config->path + ": expected a model of family " + std::string(choice.family->name) +
                         ", got model_type '" + printable(model.config->model_type) + "'");
    if (model.config) TRY(model.config->check().context(model.config->path));
    model.family = numbered_for(catalog, *choice.family, *convention, model.config);
    model.convention = *convention;
    TRY(choose_convention(catalog, choice, model));
    return model;
  }
  const Family* said = model.config ? describing_family(*model.config) : nullptr;
  if (model.config && !said) return model;  // another model with similar names
  if (const auto detected = detect_family(catalog, model.config_or_null(), choice.families);
      detected && (!said || is_kind_of(*detected->family, *said, *model.config))) {
    model.family = numbered_for(catalog, *detected->family, detected->convention, model.config);
    model.convention = detected->convention;
  }
  TRY(choose_convention(catalog, choice, model));
  return model;
}

Result<const Family*> family_of(const ModelConfig& config, const ModelChoice& choice) {
  if (choice.is_none())
    return usage_error("--family none: this command needs a family's table of tensors; name a family");
  if (!choice.detect) return choice.family;
  if (const Family* family = family_of_model_type(config.model_type, config.text_model_type, config.families))
    return family;
  if (const Family* family = TRY(class_family(config))) return family;
  return unsupported(config.path + ": model_type '" + printable(config.model_type) + "'" +
                     (config.text_model_type.empty() ? "" : " around '" + printable(config.text_model_type) + "'") +
                     " belongs to no known family (" + join(family_names(config.families), ", ") + ")");
}

}  // namespace reshard
