// A target that can seal one place of its files without the others: for who reads an output in pieces. One that cannot
// is sealed whole each time (Target::seal), which suits those that have few headers and no checksums.
#pragma once

#include "lib/checkpoint/format.h"

namespace reshard {

class SealsPlaces {
 public:
  virtual ~SealsPlaces() = default;
  // Emits at least what of Target::seal's bytes shares any with `place`, none of it wrong, and asks for no more
  // checksums than that needs. Thread-safe.
  virtual Status seal_at(const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) const = 0;
};

// That of any target.
inline Status seal_at(const Target& target, const Extent& place, const PayloadCrc& crc, const EmitBytes& emit) {
  const auto* const places = dynamic_cast<const SealsPlaces*>(&target);
  return places ? places->seal_at(place, crc, emit) : target.seal(crc, emit);
}

}  // namespace reshard
