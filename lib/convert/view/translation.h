// SPDX-License-Identifier: Apache-2.0
// The first step of a conversion: which model the source is, which convention names its tensors, and which convention
// names those of the output.
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

// Reads the source's config.json (find_config_file); returns none if the one found does not describe a model. A
// config.json behind a link that leads out of the checkpoint is not copied to the output unless the user gave it.
Result<ConfigFile> read_config_file(Reader& source, const Request& wanted, ConversionNotes& notes);

struct Translation {
  Model model;                         // of the source; it has a config only if it has a family
  std::optional<ModelConfig> said;     // the source's config.json, of a known family or not
  std::optional<Float8Scales> float8;  // as config.json describes them; nothing with --family none
  PackedWeights packed;                // of the translated catalog
  std::optional<Convention> to;        // nothing: names and rows as in the source
  // For a model of no known family: use the source's names without the wrapper's prefix. With --family none, names are
  // as stored unless --strip-prefix or --rename changes them.
  bool plain_names = false;
  std::string foreign_prefix;  // in front of plain names, but not of the class's (unknown_family.h)
  bool hf_rows = false;        // source and output order rows differently, so the plan uses Hugging Face's order
  bool renames() const { return model.family && to; }
  // Returns the output's name of a tensor of the canonical view; `key` is its plain key in the source.
  std::string target_name(const std::string& canonical, const std::string& key) const;
};
Result<Translation> translate(const Catalog& source, const ModelChoice& choice, const ConfigFile& file,
                              const Naming& naming, const Format& format);

// Checks that an output which claims to be a model has names that loaders of its format (or of --names) know. Fails
// (unsupported) if the source's names belong to no known family, unless the user chose --family none, the source is a
// model already, or config.json confirms the tensors (unknown_family.h); then it notes that the names are the source's
// own. Clears `file` if it describes another model, so that it is not copied.
Status check_names(const Catalog& source, const Translation& names, const Request& wanted, const Format& format,
                   ConfigFile& file, ConversionNotes& notes);

}  // namespace reshard
