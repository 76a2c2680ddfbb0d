// Converts the wire's sampling parameters to the services' struct, with documented defaults for
// unset fields, and back. ValidateSamplingParams, not this, checks the values.
#ifndef ISOBIT_COMMON_RPC_SAMPLING_PARAMS_PROTO_H_
#define ISOBIT_COMMON_RPC_SAMPLING_PARAMS_PROTO_H_

#include "common/config/sampling_params.h"
#include "isobit/v1/types.pb.h"

namespace isobit {

SamplingParams SamplingParamsFromProto(const v1::SamplingParams& proto);

// The inverse; sets every field.
v1::SamplingParams SamplingParamsToProto(const SamplingParams& params);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_SAMPLING_PARAMS_PROTO_H_
