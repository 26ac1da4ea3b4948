// The first step of a conversion: which model the source is, in whose words, and in whose words the output is.
#pragma once

#include <optional>
#include <string>

#include "lib/checkpoint/format.h"
#include "lib/convert/view/conversion_notes.h"
#include "lib/convert/view/request.h"
#include "lib/model/config.h"
#include "lib/model/model.h"
#include "lib/model/quantization.h"

namespace reshard {

// The source's (find_config_file); none where the one that was found is of no model. One that lies behind a link out of
// the checkpoint is not copied unless the user gave it.
Result<ConfigFile> read_config_file(Reader& source, const Request& wanted, ConversionNotes& notes);

struct Translation {
  Model model;                         // of the source; with a config only where it has a family
  std::optional<ModelConfig> said;     // the source's config.json, of a known family or not
  std::optional<Float8Scales> float8;  // as it says; nothing where no family is wanted
  PackedWeights packed;                // of the catalog that was translated
  std::optional<Convention> to;        // nothing: names and rows as in the source
  // Of no family: the source's names without what wraps the model in it. Where none was wanted, they are as stored
  // unless --strip-prefix or --rename changes them.
  bool plain_names = false;
  bool hf_rows = false;  // the two have rows in different orders, and the plan is made in Hugging Face's
  bool renames() const { return model.family && to; }
  // What the output calls a tensor of the canonical view; `key` is its plain key in the source.
  std::string target_name(const std::string& canonical, const std::string& key) const;
};
Result<Translation> translate(const Catalog& source, const ModelChoice& choice, const ConfigFile& file,
                              const Naming& naming, const Format& format);

// What is written under the name of a format of models, or of --names, is a model under names that loaders know.
// Unsupported where the source's names are no known family's, unless the user chose none, the source is a model
// already, or its config of no known family confirms it (unknown_family.h): then it is a note that they are the
// source's own. A config that is of another model is not copied.
Status check_names(const Catalog& source, const Translation& names, const Request& wanted, const Format& format,
                   ConfigFile& file, ConversionNotes& notes);

}  // namespace reshard
